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

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.timeline.columns import Coded
    from meshwright.timeline.mend import Repaired, repair
    from meshwright.timeline.perfetto import write_perfetto
    from meshwright.timeline.schema import COUNTER_COLUMNS, SPAN_COLUMNS, Kind, Source
    from meshwright.timeline.store import count_spans, read, read_ranks, write
    from meshwright.timeline.timeline import Timeline
    from meshwright.timeline.writer import TimelineWriter

_HOMES = {
    "COUNTER_COLUMNS": "meshwright.timeline.schema",
    "SPAN_COLUMNS": "meshwright.timeline.schema",
    "Coded": "meshwright.timeline.columns",
    "Kind": "meshwright.timeline.schema",
    "Repaired": "meshwright.timeline.mend",
    "Source": "meshwright.timeline.schema",
    "Timeline": "meshwright.timeline.timeline",
    "TimelineWriter": "meshwright.timeline.writer",
    "count_spans": "meshwright.timeline.store",
    "read": "meshwright.timeline.store",
    "read_ranks": "meshwright.timeline.store",
    "repair": "meshwright.timeline.mend",
    "write": "meshwright.timeline.store",
    "write_perfetto": "meshwright.timeline.perfetto",
}

__all__ = [
    "COUNTER_COLUMNS",
    "SPAN_COLUMNS",
    "Coded",
    "Kind",
    "Repaired",
    "Source",
    "Timeline",
    "TimelineWriter",
    "count_spans",
    "read",
    "read_ranks",
    "repair",
    "write",
    "write_perfetto",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
