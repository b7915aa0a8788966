"""Alibaba's PAI of 2020: jobs of tasks of instances, in tables that have their headers beside them.

A job is put together from its tasks: instances times the share of a GPU that each plans for. Its
submission is the job's own start, and its start that of its first task.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.fleet.measures.windows import Floats
from meshwright.observe.fleet.sources.public.columns import GIB, number, state, text
from meshwright.observe.fleet.sources.public.files import Part
from meshwright.observe.fleet.sources.public.form import Form, Tables, Told, form, jobs, nodes
from meshwright.observe.fleet.sources.source import rows_of

HEADERS: dict[int, tuple[str, ...]] = {
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


def with_header(part: Part) -> Part:
    """Return a table without a header with the names that its width and first rows give away."""
    first = part.columns
    rows = (first, *part.rows)
    if len(first) == len(_SPEC) and all(cell.replace(".", "").isdigit() for cell in first[2:]):
        return part.with_names(_SPEC)
    if len(first) == len(_TAGS) and first[0] and _HEX.issuperset(first[0] + first[1] + first[3]):
        return part.with_names(_TAGS)
    names = HEADERS.get(len(first))
    if names is None or not _HEX.issuperset(first[0]) or not first[0]:
        return part
    if "status" in names and not {row[names.index("status")] for row in rows} <= _STATUS:
        return part
    return part.with_names(names)


_HEX = frozenset("0123456789abcdef")


def _machines(block: pa.Table, told: Told) -> Tables:
    return nodes(
        told,
        text(block, "machine"),
        np.zeros(block.num_rows),
        gpus=pa.array(number(block, "cap_gpu"), from_pandas=True).cast(pa.int32()),
        gpu_kind=text(block, "gpu_type"),
        cpus=number(block, "cap_cpu"),
        memory=number(block, "cap_mem", GIB),
    )


class Beside(NamedTuple):
    """Tables that tell more of jobs, where they are at hand."""

    tags: Part | None = None
    sensors: Part | None = None


def read_jobs(job_part: Part, task_part: Part, beside: Beside, told: Told) -> Tables:
    """Read jobs with what their tasks plan for, what they work on, and what was measured."""
    listed, tasks = job_part.whole(), tasks_of(task_part)
    sums = [(name, "sum") for name in ("gpus", "cpus", "memory")]
    whole = tasks.group_by("job_name").aggregate([*sums, ("start_s", "min"), ("gpu_type", "min")])
    joined = listed.join(whole, "job_name").combine_chunks()
    if beside.tags is not None:
        told_of = beside.tags.whole(("inst_id", "workload")).group_by("inst_id")
        joined = joined.join(told_of.aggregate([("workload", "max")]), "inst_id").combine_chunks()
    if beside.sensors is not None:
        joined = joined.join(_measured(beside.sensors), "job_name").combine_chunks()
    gpus = _floats(joined, "gpus_sum")
    with np.errstate(invalid="ignore", divide="ignore"):
        util = np.where(gpus > 0, _floats(joined, "gpu_wrk_util_sum") / 100 / gpus, np.nan)
    return jobs(
        joined,
        told,
        job=text(joined, "job_name"),
        user=text(joined, "user"),
        state=state(joined, "status"),
        submit_s=_after_nought(number(joined, "start_time")),
        start_s=joined["start_s_min"],
        end_s=_after_nought(number(joined, "end_time")),
        gpus=joined["gpus_sum"],
        cpus=joined["cpus_sum"],
        memory_asked=joined["memory_sum"],
        gpu_kind=joined["gpu_type_min"],
        work=text(joined, "workload_max"),
        gpu_util=util,
        gpu_memory_peak=_floats(joined, "max_gpu_wrk_mem_sum") * GIB,
        memory_peak=_floats(joined, "max_mem_sum") * GIB,
    )


def _measured(part: Part) -> pa.Table:
    """Add up over a job's instances what each was measured at: the mean use, the most memory."""
    sensed = ("gpu_wrk_util", "max_gpu_wrk_mem", "max_mem")
    partial = []
    for block in part.blocks(("job_name", *sensed)):
        columns = {name: _nulls(number(block, name)) for name in sensed}
        rows = pa.table({"job_name": text(block, "job_name"), **columns})
        partial.append(rows.group_by("job_name").aggregate([(name, "sum") for name in sensed]))
    names = [f"{name}_sum" for name in sensed]
    found = pa.concat_tables(partial).group_by("job_name").aggregate([(n, "sum") for n in names])
    return found.select(["job_name", *(f"{name}_sum" for name in names)]).rename_columns(
        ["job_name", *names]
    )


def tasks_of(part: Part) -> pa.Table:
    """Read tasks: what one instance of each plans for, and all of them together."""
    block = part.whole()
    instances = np.nan_to_num(number(block, "inst_num"), nan=1.0)
    share = np.nan_to_num(number(block, "plan_gpu", 0.01))
    return pa.table(
        {
            "job_name": text(block, "job_name"),
            "task_name": text(block, "task_name"),
            "status": text(block, "status"),
            "gpu_type": text(block, "gpu_type"),
            "share": share,
            "instances": instances,
            "gpus": share * instances,
            "cpus": np.nan_to_num(number(block, "plan_cpu", 0.01)) * instances,
            "memory": np.nan_to_num(number(block, "plan_mem", GIB)) * instances,
            "start_s": _nulls(_after_nought(number(block, "start_time"))),
            "end_s": _nulls(_after_nought(number(block, "end_time"))),
        }
    )


def read_held(instance_part: Part, tasks: pa.Table, told: Told) -> Iterator[Tables]:
    """Read on which machine each instance held its share of a GPU; which GPU is not told."""
    shares = tasks.select([*_TASK, "share"])
    for block in instance_part.blocks():
        known = pa.table(
            {
                "job_name": text(block, "job_name"),
                "task_name": text(block, "task_name"),
                "node": text(block, "machine"),
                "start_s": _nulls(_after_nought(number(block, "start_time"))),
                "end_s": _nulls(_after_nought(number(block, "end_time"))),
            }
        )
        joined = known.join(shares, _TASK, join_type="inner")
        joined = joined.filter(pc.greater(joined["share"], 0))
        alike = ["job_name", "node", "start_s", "end_s"]
        summed = joined.group_by(alike).aggregate([("share", "sum")])
        count = summed.num_rows
        columns = {
            "cluster": [told.cluster] * count,
            "job": summed["job_name"],
            "attempt": np.zeros(count, dtype=np.int32),
            "node": summed["node"],
            "start_s": summed["start_s"],
            "end_s": summed["end_s"],
            "share": summed["share_sum"],
            "seen_s": np.full(count, told.seen_s),
        }
        yield {"held": rows_of("held", columns)}


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


JOB = form("PAI jobs", "job_name, inst_id, user, status, start_time, end_time", None, "PAI")
TASK = form("PAI tasks", "job_name, task_name, inst_num, plan_gpu, gpu_type", None, "PAI")
INSTANCE = form(
    "PAI instances", "job_name, task_name, worker_name, machine, start_time", None, "PAI"
)
SENSOR = form("PAI sensors", "worker_name, machine, gpu_wrk_util, max_gpu_wrk_mem", None, "PAI")
TAGS = form("PAI tags", "inst_id, user, gpu_type_spec, group, workload", None, "PAI")
FORMS: tuple[Form, ...] = (
    JOB,
    TAGS,
    TASK,
    INSTANCE,
    SENSOR,
    form("PAI machines", "machine, gpu_type, cap_cpu, cap_mem, cap_gpu", _machines, "PAI"),
)
