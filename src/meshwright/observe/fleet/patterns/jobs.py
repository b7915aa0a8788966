"""Jobs as columns: who ran what when, on how much."""

from typing import Any

import msgspec
import numpy as np

from meshwright.observe.fleet.patterns.arrays import Flags, Floats, Ints, Words, floats, words
from meshwright.observe.fleet.patterns.places import Places

_ENDS = ("completed", "failed", "cancelled", "timeout", "out_of_memory", "node_fail", "preempted",
         "requeued")  # fmt: skip


class Jobs(msgspec.Struct, frozen=True, eq=False):
    """Attempts of jobs, one row each; times that are not known are nan."""

    number: int
    cluster: Words
    job: Words
    attempt: Ints
    name: Words
    user: Words
    team: Words
    partition: Words
    array: Words
    state: Words
    exit_code: Ints
    """-1 where it is not known."""
    signal: Ints
    reason: Words
    interactive: Flags
    work: Words
    submit_s: Floats
    eligible_s: Floats
    start_s: Floats
    end_s: Floats
    """Null in accounting while a job runs; here the end of the time then."""
    limit_s: Floats
    gpus: Floats
    """Nought where it is not known."""
    gpu_kind: Words
    cpus: Floats
    memory_asked: Floats
    memory_peak: Floats
    cpu_s: Floats
    run_s: Floats
    """How long it ran, in all."""
    hours: Floats
    """GPU-hours within the time looked at."""
    ended: Flags
    """Whether it is over."""
    on_job: Ints
    """Rows of jobs, one for each node that they ran on,"""
    on_node: Ints
    """and those nodes."""
    gpu_util: Floats
    """The mean over its GPUs that accounting keeps."""
    keys: Any
    """What names each row, for joins."""
    numbers: Any
    """The same with the scheduler's own numbers, which prologs and telemetry tell."""

    def rows_of(self, table: Any) -> Ints:
        """The job of each row of another table; -1 where there is none."""
        import pyarrow.compute as pc

        if not table.num_rows or not self.number:
            return np.full(table.num_rows, -1, dtype=np.int64)
        asked = _keys(table)
        found = pc.index_in(asked, value_set=self.keys)
        found = pc.coalesce(found, pc.index_in(asked, value_set=self.numbers), -1)
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)

    def label(self, row: int) -> str:
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


def jobs_of(table: Any, places: Places, since_s: float, until_s: float) -> Jobs:
    """Columns of the table of jobs that waited or ran within the time."""
    import pyarrow.compute as pc

    start, end = pc.fill_null(table["start_s"], until_s), pc.fill_null(table["end_s"], until_s)
    began = pc.fill_null(pc.min_element_wise(start, table["submit_s"]), since_s)
    table = table.filter(pc.and_(pc.greater(end, since_s), pc.less(began, until_s)))
    state = words(table, "state")
    start_s, end_s = floats(table, "start_s"), floats(table, "end_s")
    ran = ~np.isnan(start_s)
    end_s = np.where(np.isnan(end_s) & ran, until_s, end_s)
    gpus = np.nan_to_num(floats(table, "gpus"))
    run_s = np.where(ran, np.maximum(end_s - start_s, 0.0), 0.0)
    inside = np.minimum(end_s, until_s) - np.maximum(start_s, since_s)
    offsets, nodes = _lists(table.column("nodes"))
    on_job = np.repeat(np.arange(table.num_rows), np.diff(offsets))
    clusters = words(table, "cluster")
    return Jobs(
        table.num_rows,
        clusters,
        words(table, "job"),
        np.nan_to_num(floats(table, "attempt")).astype(np.int64),
        *(words(table, name) for name in ("name", "user", "team", "partition", "array")),
        state,
        np.nan_to_num(floats(table, "exit_code"), nan=-1).astype(np.int64),
        np.nan_to_num(floats(table, "signal")).astype(np.int64),
        words(table, "reason"),
        np.nan_to_num(floats(table, "interactive")).astype(np.bool_),
        words(table, "work"),
        floats(table, "submit_s"),
        floats(table, "eligible_s"),
        start_s,
        end_s,
        floats(table, "limit_s"),
        gpus,
        words(table, "gpu_kind"),
        *(floats(table, name) for name in ("cpus", "memory_asked", "memory_peak", "cpu_s")),
        run_s,
        np.where(ran, gpus * np.maximum(inside, 0.0) / 3600, 0.0),
        state.equals(*_ENDS),
        on_job,
        places.of_words(clusters, on_job, nodes),
        floats(table, "gpu_util"),
        _keys(table),
        _keys(table, "number"),
    )


def _lists(column: Any) -> tuple[Ints, Words]:
    """Offsets and flat values of a column of lists."""
    import pyarrow as pa

    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    lengths = np.nan_to_num(whole.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    flat = pa.table({"value": whole.flatten()})
    return np.append(0, np.cumsum(lengths)), words(flat, "value")
