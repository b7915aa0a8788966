"""Alibaba's PAI of 2020: jobs of tasks of instances, in tables that have their headers beside them.

A job is put together from its tasks: instances times the share of a GPU that each plans for. Its
submission is the job's own start, and its start that of its first task.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.columns import Floats
from meshwright.fleet.sources.public_traces.columns import (
    GIB,
    read_numbers,
    read_states,
    read_text,
    to_counts,
)
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.public_traces.trace_files import TraceTable
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
    make_job_rows,
    make_node_rows,
)
from meshwright.fleet.sources.row_faults import RowFaults
from meshwright.fleet.sources.source import make_rows

HEADER_BY_WIDTH: dict[int, tuple[str, ...]] = {
    6: ("job_name", "inst_id", "user", "status", "start_time", "end_time"),
    9: (
        "job_name", "task_name", "inst_name", "worker_name", "inst_id", "status", "start_time",
        "end_time", "machine",
    ),
    10: (
        "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu",
        "plan_mem", "plan_gpu", "gpu_type",
    ),
    12: (
        "worker_name", "machine", "start_time", "end_time", "machine_cpu_iowait",
        "machine_cpu_kernel", "machine_cpu_usr", "machine_gpu", "machine_load_1",
        "machine_net_receive", "machine_num_worker", "machine_cpu",
    ),
    16: (
        "job_name", "task_name", "worker_name", "inst_id", "machine", "gpu_name", "cpu_usage",
        "gpu_wrk_util", "avg_mem", "max_mem", "avg_gpu_wrk_mem", "max_gpu_wrk_mem", "read", "write",
        "read_count", "write_count",
    ),
}  # fmt: skip
"""Headers by the number of columns, for tables that came without one."""
_SPEC = ("machine", "gpu_type", "cap_cpu", "cap_mem", "cap_gpu")
_TAGS = ("inst_id", "user", "gpu_type_spec", "group", "workload")
_STATUS = {"Terminated", "Failed", "Running", "Waiting"}
_TASK = ["job_name", "task_name"]


def add_header(part: TraceTable) -> TraceTable:
    """Return a table without a header with the names that its width and first rows give away."""
    first = part.columns
    rows = (first, *part.head_rows)
    if len(first) == len(_SPEC) and all(cell.replace(".", "").isdigit() for cell in first[2:]):
        return part.with_columns(_SPEC)
    if len(first) == len(_TAGS) and first[0] and _HEX.issuperset(first[0] + first[1] + first[3]):
        return part.with_columns(_TAGS)
    names = HEADER_BY_WIDTH.get(len(first))
    if names is None or not _HEX.issuperset(first[0]) or not first[0]:
        return part
    if "status" in names and not {row[names.index("status")] for row in rows} <= _STATUS:
        return part
    return part.with_columns(names)


_HEX = frozenset("0123456789abcdef")


def _machines(block: TraceBlock, told: ReadContext) -> RowsByTable:
    return make_node_rows(
        told,
        read_text(block, "machine"),
        np.zeros(block.num_rows),
        gpus=to_counts(read_numbers(block, "cap_gpu")),
        gpu_kind=read_text(block, "gpu_type"),
        cpus=read_numbers(block, "cap_cpu"),
        memory=read_numbers(block, "cap_mem", GIB),
    )


class JobMetadata(NamedTuple):
    """Tables that tell more of jobs, where they are at hand."""

    tags: TraceTable | None = None
    sensors: TraceTable | None = None


def read_jobs(
    job_part: TraceTable, task_part: TraceTable, beside: JobMetadata, told: ReadContext
) -> RowsByTable:
    """Read jobs with what their tasks plan for, what they work on, and what was measured."""
    listed, tasks = _list_jobs(job_part, told), read_tasks(task_part, told)
    sums = [(name, "sum") for name in ("gpus", "cpus", "memory")]
    whole = tasks.group_by("job_name").aggregate([*sums, ("start_s", "min"), ("gpu_type", "min")])
    joined = listed.join(whole, "job_name").combine_chunks()
    if beside.tags is not None:
        told_of = beside.tags.read_all(("inst_id", "workload")).group_by("inst_id")
        joined = joined.join(told_of.aggregate([("workload", "max")]), "inst_id").combine_chunks()
    if beside.sensors is not None:
        joined = joined.join(_measured(beside.sensors), "job_name").combine_chunks()
    gpus = _floats(joined, "gpus_sum")
    with np.errstate(invalid="ignore", divide="ignore"):
        util = np.where(gpus > 0, _floats(joined, "gpu_wrk_util_sum") / 100 / gpus, np.nan)
    return make_job_rows(
        joined,
        told,
        job=read_text(joined, "job_name"),
        user=read_text(joined, "user"),
        state=read_states(joined, "status"),
        submit_s=_after_nought(read_numbers(joined, "start_time")),
        start_s=joined["start_s_min"],
        end_s=_after_nought(read_numbers(joined, "end_time")),
        gpus=joined["gpus_sum"],
        cpus=joined["cpus_sum"],
        memory_requested=joined["memory_sum"],
        gpu_kind=joined["gpu_type_min"],
        workload=read_text(joined, "workload_max"),
        gpu_util=util,
        gpu_memory_peak=_floats(joined, "max_gpu_wrk_mem_sum") * GIB,
        memory_peak=_floats(joined, "max_mem_sum") * GIB,
    )


def _list_jobs(part: TraceTable, told: ReadContext) -> pa.Table:
    """Return the rows of jobs that can be true."""
    block = told.open_block(part.read_all(), part)
    first, last = (_after_nought(read_numbers(block, name)) for name in ("start_time", "end_time"))
    unknown = np.full(block.num_rows, np.nan)
    times = {"submit_s": first, "start_s": unknown, "end_s": last, "gpus": unknown}
    block.check_jobs(pa.table(times), {"submit_s": ("start_time",), "end_s": ("end_time",)})
    block.check_repeats(read_text(block, "job_name"))
    return block.filter_sound()


def _measured(part: TraceTable) -> pa.Table:
    """Add up over a job's instances what each was measured at: the mean use, the most memory."""
    sensed = ("gpu_wrk_util", "max_gpu_wrk_mem", "max_mem")
    partial = []
    for block in part.iter_blocks(("job_name", *sensed)):
        columns = {name: _nulls(read_numbers(block, name)) for name in sensed}
        rows = pa.table({"job_name": read_text(block, "job_name"), **columns})
        partial.append(rows.group_by("job_name").aggregate([(name, "sum") for name in sensed]))
    names = [f"{name}_sum" for name in sensed]
    found = pa.concat_tables(partial).group_by("job_name").aggregate([(n, "sum") for n in names])
    return found.select(["job_name", *(f"{name}_sum" for name in names)]).rename_columns(
        ["job_name", *names]
    )


def read_tasks(part: TraceTable, told: ReadContext | None = None) -> pa.Table:
    """Read tasks: what one instance of each plans for, and all of them together."""
    rows = part.read_all()
    block = TraceBlock(rows, RowFaults(part.label)) if told is None else told.open_block(rows, part)
    instances = np.nan_to_num(read_numbers(block, "inst_num"), nan=1.0)
    share = np.nan_to_num(read_numbers(block, "plan_gpu", 0.01))
    tasks = pa.table(
        {
            "job_name": read_text(block, "job_name"),
            "task_name": read_text(block, "task_name"),
            "status": read_text(block, "status"),
            "gpu_type": read_text(block, "gpu_type"),
            "gpu_fraction": share,
            "instances": instances,
            "gpus": share * instances,
            "cpus": np.nan_to_num(read_numbers(block, "plan_cpu", 0.01)) * instances,
            "memory": np.nan_to_num(read_numbers(block, "plan_mem", GIB)) * instances,
            "start_s": _nulls(_after_nought(read_numbers(block, "start_time"))),
            "end_s": _nulls(_after_nought(read_numbers(block, "end_time"))),
        }
    )
    with np.errstate(invalid="ignore"):
        late = _floats(tasks, "end_s") < _floats(tasks, "start_s")
    block.add_fault(late, "end_time", "lies before the start", "swap them")
    block.faults.count_block(block.faulty)
    return tasks.filter(pa.array(~block.faulty))


def read_allocations(
    instance_part: TraceTable, tasks: pa.Table, told: ReadContext
) -> Iterator[RowsByTable]:
    """Read on which machine each instance held its share of a GPU; which GPU is not told."""
    shares = tasks.select([*_TASK, "gpu_fraction"])
    first_row = 0
    for rows in instance_part.iter_blocks():
        block = told._replace(first_row=first_row).open_block(rows, instance_part)
        first_row += rows.num_rows
        known = pa.table(
            {
                "job_name": read_text(block, "job_name"),
                "task_name": read_text(block, "task_name"),
                "node": read_text(block, "machine"),
                "start_s": _nulls(_after_nought(read_numbers(block, "start_time"))),
                "end_s": _nulls(_after_nought(read_numbers(block, "end_time"))),
            }
        )
        with np.errstate(invalid="ignore"):
            late = _floats(known, "end_s") < _floats(known, "start_s")
        block.add_fault(late, "end_time", "lies before the start", "swap them")
        block.faults.count_block(block.faulty)
        known = known.filter(pa.array(~block.faulty))
        joined = known.join(shares, _TASK, join_type="inner")
        joined = joined.filter(pc.greater(joined["gpu_fraction"], 0))
        alike = ["job_name", "node", "start_s", "end_s"]
        summed = joined.group_by(alike).aggregate([("gpu_fraction", "sum")])
        count = summed.num_rows
        columns = {
            "cluster": [told.cluster] * count,
            "job": summed["job_name"],
            "attempt": np.zeros(count, dtype=np.int32),
            "node": summed["node"],
            "start_s": summed["start_s"],
            "end_s": summed["end_s"],
            "gpu_fraction": summed["gpu_fraction_sum"],
            "seen_s": np.full(count, told.seen_s),
        }
        yield {"allocations": make_rows("allocations", columns)}


def _after_nought(values: np.ndarray) -> np.ndarray:
    """Return times; nought stands for one that was never written."""
    return np.where(values > 0, values, np.nan)


def _floats(table: pa.Table, name: str) -> Floats:
    """Return a column as numbers; all NaN where there is no such column."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return np.asarray(table[name].cast(pa.float64()).to_numpy(), dtype=np.float64)


def _nulls(values: np.ndarray) -> pa.Array:
    return pa.array(values, from_pandas=True)


JOB_FORMAT = define_format(
    "PAI jobs", "job_name, inst_id, user, status, start_time, end_time", None, "PAI"
)
TASK_FORMAT = define_format(
    "PAI tasks", "job_name, task_name, inst_num, plan_gpu, gpu_type", None, "PAI"
)
INSTANCE_FORMAT = define_format(
    "PAI instances", "job_name, task_name, worker_name, machine, start_time", None, "PAI"
)
SENSOR_FORMAT = define_format(
    "PAI sensors", "worker_name, machine, gpu_wrk_util, max_gpu_wrk_mem", None, "PAI"
)
TAG_FORMAT = define_format("PAI tags", "inst_id, user, gpu_type_spec, group, workload", None, "PAI")
TRACE_FORMATS: tuple[TraceFormat, ...] = (
    JOB_FORMAT,
    TAG_FORMAT,
    TASK_FORMAT,
    INSTANCE_FORMAT,
    SENSOR_FORMAT,
    define_format("PAI machines", "machine, gpu_type, cap_cpu, cap_mem, cap_gpu", _machines, "PAI"),
)
