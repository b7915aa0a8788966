"""What a form of trace is: the columns that tell it, and how its blocks become rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.columns import Floats
from meshwright.fleet.sources.public_traces.fault_log import FaultLog
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.public_traces.trace_files import TraceTable
from meshwright.fleet.sources.source import make_rows

RowsByTable = dict[str, pa.Table]


class ReadContext(NamedTuple):
    """What a block is read with."""

    cluster: str
    seen_s: float
    table: TraceTable
    first_row: int = 0
    """How many rows came before the block."""
    zone: str = ""
    """The zone that the user gave for times without one; empty: none."""
    log: FaultLog = FaultLog()
    """Counts the faulty rows of each file."""

    def open_block(self, rows: pa.Table, table: TraceTable) -> TraceBlock:
        """Return rows of a file as a block whose faults are counted."""
        return TraceBlock(rows, self.log.open(table), self.first_row, self.zone)


class TraceFormat(NamedTuple):
    """One form of trace."""

    name: str
    required_columns: frozenset[str]
    """Columns that all tables of this form have."""
    read_block: Callable[[TraceBlock, ReadContext], RowsByTable] | None
    """Makes rows of a block; None: it holds statistics, not telemetry."""
    cluster: str = ""
    """The cluster's name where the form tells it; empty: that of the folder."""
    needs_whole_table: bool = False
    """Whether rows can only be made of the whole table."""
    excluded_columns: frozenset[str] = frozenset()
    """Columns that tables of this form do not have."""
    has_dates: bool = False
    """Whether times may be dates, to which a zone belongs."""


def define_format(
    name: str,
    columns: str,
    read: Callable[[TraceBlock, ReadContext], RowsByTable] | None,
    cluster: str = "",
    *,
    whole: bool = False,
    without: str = "",
    dates: bool = False,
) -> TraceFormat:
    """Make a form from comma-separated names of columns."""
    return TraceFormat(name, _names(columns), read, cluster, whole, _names(without), dates)


def match_format(part: TraceTable, forms: Iterable[TraceFormat]) -> TraceFormat | None:
    """Return the form with the most columns that a part has all of."""
    names = frozenset(part.columns)
    fitting = [
        one for one in forms if one.required_columns <= names and not one.excluded_columns & names
    ]
    return max(fitting, key=lambda one: len(one.required_columns), default=None)


_ORIGINS: Final = {
    "submit_s": ("submit_time", "creation_time", "timestamp", "time", "start_time"),
    "start_s": ("start_time", "scheduled_time", "submit_time", "timestamp"),
    "end_s": ("end_time", "deletion_time", "duration"),
    "gpus": ("gpu_num", "num_gpu", "num_gpus", "gpu_request", "num_replicas"),
}
"""Columns of traces that columns of jobs are made of."""


def make_job_rows(
    block: pa.Table | TraceBlock,
    told: ReadContext,
    *,
    origins: Mapping[str, Sequence[str]] | None = None,
    **columns: object,
) -> RowsByTable:
    """Make rows of jobs; what all of them share is filled in, and what cannot be is counted."""
    alike = {
        "cluster": [told.cluster] * block.num_rows,
        "attempt": np.zeros(block.num_rows, dtype=np.int32),
        "seen_s": np.full(block.num_rows, told.seen_s),
    }
    made = make_rows("jobs", alike | columns)
    if isinstance(block, TraceBlock):
        block.check_jobs(made, origins or _ORIGINS)
        block.check_repeats(made["job"])
    return {"jobs": made}


def name_jobs_by_row(block: TraceBlock, told: ReadContext) -> pa.Array:
    """Return the number of each row in its file, as the name of its job."""
    rows = range(told.first_row, told.first_row + block.num_rows)
    return pa.array([str(row) for row in rows], pa.string())


def make_node_rows(
    told: ReadContext, node: object, since_s: Floats, **columns: object
) -> RowsByTable:
    """Make rows of nodes that are up, from `since_s` on."""
    rows = len(since_s)
    alike = {
        "cluster": [told.cluster] * rows,
        "node": node,
        "since_s": since_s,
        "state": ["up"] * rows,
        "seen_s": np.full(rows, told.seen_s),
    }
    return {"nodes": make_rows("nodes", alike | columns)}


def _names(words: str) -> frozenset[str]:
    return frozenset(word.strip() for word in words.split(",") if word.strip())
