"""Jobs as columns: who ran what when, on how much."""

from typing import Any

import msgspec
import numpy as np

from meshwright.fleet.columns import CodedColumn, read_floats, read_text
from meshwright.fleet.patterns.data.group_math import Flags, Floats, Ints
from meshwright.fleet.patterns.data.node_index import NodeIndex

_ENDS = ("completed", "failed", "cancelled", "timeout", "out_of_memory", "node_fail", "preempted",
         "requeued")  # fmt: skip


class JobColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Attempts of jobs, one row each; times that are not known are nan."""

    num_jobs: int
    cluster: CodedColumn
    job: CodedColumn
    attempt: Ints
    name: CodedColumn
    user: CodedColumn
    team: CodedColumn
    partition: CodedColumn
    array: CodedColumn
    state: CodedColumn
    exit_code: Ints
    """-1 where it is not known."""
    signal: Ints
    reason: CodedColumn
    interactive: Flags
    workload: CodedColumn
    submit_s: Floats
    eligible_s: Floats
    start_s: Floats
    end_s: Floats
    """Null in accounting while a job runs; here the end of the time then."""
    time_limit_s: Floats
    gpus: Floats
    """Nought where it is not known."""
    gpu_kind: CodedColumn
    cpus: Floats
    memory_requested_bytes: Floats
    peak_memory_bytes: Floats
    cpu_s: Floats
    run_s: Floats
    """How long it ran, in all."""
    gpu_hours: Floats
    """GPU-hours within the time looked at."""
    is_finished: Flags
    """Whether it is over."""
    placement_job: Ints
    """Rows of jobs, one for each node that they ran on,"""
    placement_node: Ints
    """and those nodes."""
    gpu_util: Floats
    """The mean over its GPUs that accounting keeps."""
    keys: Any
    """What names each row, for joins."""
    scheduler_keys: Any
    """The same with the scheduler's own numbers, which prologs and telemetry tell."""

    def match_rows(self, table: Any) -> Ints:
        """The job of each row of another table; -1 where there is none."""
        import pyarrow.compute as pc

        if not table.num_rows or not self.num_jobs:
            return np.full(table.num_rows, -1, dtype=np.int64)
        asked = _keys(table)
        found = pc.index_in(asked, value_set=self.keys)
        found = pc.coalesce(found, pc.index_in(asked, value_set=self.scheduler_keys), -1)
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)

    def format_label(self, row: int) -> str:
        """How a job is called: its number, and its name where it has one."""
        name = self.name.at(row)
        return f"{self.job.at(row)} ({name})" if name else self.job.at(row)


def _keys(table: Any, of: str = "job") -> Any:
    """What names each row of a table; null where `of` is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    named = of if of in table.column_names else "job"
    parts = [pc.fill_null(table.column("cluster").cast(pa.string()), ""),
             table.column(named).cast(pa.string()),
             pc.fill_null(table.column("attempt").cast(pa.string()), "0")]  # fmt: skip
    joined = pc.binary_join_element_wise(*parts, "\0")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def build_job_columns(table: Any, places: NodeIndex, since_s: float, until_s: float) -> JobColumns:
    """Columns of the table of jobs that waited or ran within the time."""
    import pyarrow.compute as pc

    start, end = pc.fill_null(table["start_s"], until_s), pc.fill_null(table["end_s"], until_s)
    began = pc.fill_null(pc.min_element_wise(start, table["submit_s"]), since_s)
    table = table.filter(pc.and_(pc.greater(end, since_s), pc.less(began, until_s)))
    state = read_text(table, "state")
    start_s, end_s = read_floats(table, "start_s"), read_floats(table, "end_s")
    ran = ~np.isnan(start_s)
    end_s = np.where(np.isnan(end_s) & ran, until_s, end_s)
    gpus = np.nan_to_num(read_floats(table, "gpus"))
    run_s = np.where(ran, np.maximum(end_s - start_s, 0.0), 0.0)
    inside = np.minimum(end_s, until_s) - np.maximum(start_s, since_s)
    offsets, nodes = _lists(table.column("nodes"))
    on_job = np.repeat(np.arange(table.num_rows), np.diff(offsets))
    clusters = read_text(table, "cluster")
    return JobColumns(
        num_jobs=table.num_rows,
        cluster=clusters,
        job=read_text(table, "job"),
        attempt=_whole(table, "attempt", 0),
        name=read_text(table, "name"),
        user=read_text(table, "user"),
        team=read_text(table, "team"),
        partition=read_text(table, "partition"),
        array=read_text(table, "array"),
        state=state,
        exit_code=_whole(table, "exit_code", -1),
        signal=_whole(table, "signal", 0),
        reason=read_text(table, "reason"),
        interactive=_whole(table, "interactive", 0) > 0,
        workload=read_text(table, "workload"),
        submit_s=read_floats(table, "submit_s"),
        eligible_s=read_floats(table, "eligible_s"),
        start_s=start_s,
        end_s=end_s,
        time_limit_s=read_floats(table, "time_limit_s"),
        gpus=gpus,
        gpu_kind=read_text(table, "gpu_kind"),
        cpus=read_floats(table, "cpus"),
        memory_requested_bytes=read_floats(table, "memory_requested"),
        peak_memory_bytes=read_floats(table, "memory_peak"),
        cpu_s=read_floats(table, "cpu_s"),
        run_s=run_s,
        gpu_hours=np.where(ran, gpus * np.maximum(inside, 0.0) / 3600, 0.0),
        is_finished=state.equals(*_ENDS),
        placement_job=on_job,
        placement_node=places.from_text(clusters, on_job, nodes),
        gpu_util=read_floats(table, "gpu_util"),
        keys=_keys(table),
        scheduler_keys=_keys(table, "scheduler_id"),
    )


def _whole(table: Any, name: str, absent: int) -> Ints:
    """A column of whole numbers."""
    return np.nan_to_num(read_floats(table, name), nan=absent).astype(np.int64)


def _lists(column: Any) -> tuple[Ints, CodedColumn]:
    """Offsets and flat values of a column of lists."""
    import pyarrow as pa

    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    lengths = np.nan_to_num(whole.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    flat = pa.table({"value": whole.flatten()})
    return np.append(0, np.cumsum(lengths)), read_text(flat, "value")
