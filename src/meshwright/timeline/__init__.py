"""What happened: one columnar record for simulated and measured runs.

    Timeline          the value: spans and counters as columns
    TimelineWriter    records spans of one rank while they happen
    read, write       a folder of Parquet files, one per rank
    count_spans       how many spans a folder has, without reading them
    repair            closes what a killed writer left open
    write_perfetto    a file for the Perfetto UI

Names load on first use, so that importing this package costs neither numpy nor Arrow.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.timeline.columns import DictionaryColumn
    from meshwright.timeline.perfetto.perfetto_writer import write_perfetto
    from meshwright.timeline.schema import COUNTER_COLUMNS, SPAN_COLUMNS, SpanKind, TimelineSource
    from meshwright.timeline.store.store_repair import RepairResult, repair_timeline
    from meshwright.timeline.store.timeline_folder import (
        count_spans,
        read_ranks,
        read_timeline,
        write_timeline,
    )
    from meshwright.timeline.store.timeline_writer import TimelineWriter
    from meshwright.timeline.timeline import Timeline

_MODULES = {
    "COUNTER_COLUMNS": "meshwright.timeline.schema",
    "SPAN_COLUMNS": "meshwright.timeline.schema",
    "DictionaryColumn": "meshwright.timeline.columns",
    "SpanKind": "meshwright.timeline.schema",
    "RepairResult": "meshwright.timeline.store.store_repair",
    "TimelineSource": "meshwright.timeline.schema",
    "Timeline": "meshwright.timeline.timeline",
    "TimelineWriter": "meshwright.timeline.store.timeline_writer",
    "count_spans": "meshwright.timeline.store.timeline_folder",
    "read_timeline": "meshwright.timeline.store.timeline_folder",
    "read_ranks": "meshwright.timeline.store.timeline_folder",
    "repair_timeline": "meshwright.timeline.store.store_repair",
    "write_timeline": "meshwright.timeline.store.timeline_folder",
    "write_perfetto": "meshwright.timeline.perfetto.perfetto_writer",
}

__all__ = [
    "COUNTER_COLUMNS",
    "SPAN_COLUMNS",
    "DictionaryColumn",
    "RepairResult",
    "SpanKind",
    "Timeline",
    "TimelineSource",
    "TimelineWriter",
    "count_spans",
    "read_ranks",
    "read_timeline",
    "repair_timeline",
    "write_perfetto",
    "write_timeline",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
