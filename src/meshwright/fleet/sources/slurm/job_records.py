"""What Slurm tells of a job or of a step of one, the same from whichever command it came."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

_TEXT: Final = (
    "cluster",
    "id",  # as people know it: "71", "71_3", "71_[1-4]", "71+0"
    "scheduler_id",  # as Slurm counts it
    "step",  # "batch", "extern", "0"; null: the job itself
    "record",  # which record of the accounting; a requeued job has several
    "name",
    "user",
    "uid",
    "team",
    "partition",
    "qos",
    "state",  # in Slurm's words
    "by",  # who cancelled it
    "exit",  # "code:signal"
    "reason",
    "failed_node",
    "submit_line",
    "wckey",
    "alloc",  # trackable resources that were given
    "req",  # and that were asked for
    "gres",  # generic resources, where those tell no GPU
    "gpu_kind",  # where the resources do not tell it
    "req_mem",
    "nodelist",
)
_NUMBERS: Final = (
    "submit_s", "eligible_s", "start_s", "end_s", "elapsed_s", "time_limit_s", "num_nodes", "cpus",
    "tasks", "rss_max", "rss_ave", "memory_total", "cpu_s", "gpu_util_total", "gpu_memory_total",
    "restarts",
)  # fmt: skip

RECORD_SCHEMA: Final = pa.schema(
    [*((name, pa.string()) for name in _TEXT), *((name, pa.float64()) for name in _NUMBERS)]
)
"""A job's record is followed by those of its steps."""


def make_records(columns: Mapping[str, Any], length: int) -> pa.Table:
    """Make records from some of their columns; the others are null."""
    arrays = []
    for field in RECORD_SCHEMA:
        values = columns.get(field.name)
        if values is None:
            values = pa.nulls(length, field.type)
        elif isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        elif not isinstance(values, pa.Array):
            values = pa.array(values, field.type, from_pandas=True)
        arrays.append(values)
    return pa.table(arrays, schema=RECORD_SCHEMA)


def make_records_from_rows(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Make records from one mapping each."""
    return pa.Table.from_pylist(list(rows), schema=RECORD_SCHEMA)
