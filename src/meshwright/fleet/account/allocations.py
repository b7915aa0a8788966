"""On which nodes, and where it is told on which GPUs, attempts hold what they hold."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.account.attempts import JobAttempts
from meshwright.fleet.account.inventory import NodeInventory, decode_text, find_pool
from meshwright.fleet.account.ticks import UNKNOWN_TIME, Ints, to_gpu_parts
from meshwright.fleet.columns import CodedColumn, combine_codes, encode_text, to_floats
from meshwright.fleet.tables import JOBS


class GpuAllocations(NamedTuple):
    """What attempts say to hold on one node, or somewhere where no node is told."""

    attempt: Ints
    node: Ints
    """-1 where it is not told."""
    gpu: Ints
    """-1 where it is not told."""
    gpu_parts: Ints


def add_telemetry_jobs(jobs: pa.Table, allocations: pa.Table | None) -> pa.Table:
    """Add jobs that telemetry saw holding GPUs and no accounting tells of."""
    if allocations is None or allocations.num_rows == 0:
        return jobs
    keys = ["cluster", "job", "attempt"]
    known = jobs.select(["cluster", "job"]).append_column("there", _constant(jobs, 1))
    if jobs.num_rows:
        numbered = jobs.select(["cluster", "scheduler_id"]).rename_columns(["cluster", "job"])
        known = pa.concat_tables([known, numbered.append_column("there", _constant(jobs, 1))])
    known = known.group_by(["cluster", "job"]).aggregate([])
    strange = allocations.join(known, keys=["cluster", "job"], join_type="left anti")
    if strange.num_rows == 0:
        return jobs
    share = pc.fill_null(strange["gpu_fraction"], 1.0)
    strange = strange.set_column(strange.column_names.index("gpu_fraction"), "gpu_fraction", share)
    by_gpu = strange.group_by([*keys, "node", "gpu"]).aggregate(
        [("gpu_fraction", "max"), ("start_s", "min"), ("end_s", "max"), ("end_s", "count"),
         ("job", "count"), ("seen_s", "max")]
    )  # fmt: skip
    made = by_gpu.group_by(keys).aggregate(
        [("gpu_fraction_max", "sum"), ("start_s_min", "min"), ("end_s_max", "max"),
         ("end_s_count", "sum"), ("job_count", "sum"), ("seen_s_max", "max"), ("node", "distinct")]
    )  # fmt: skip
    open_ended = pc.less(made["end_s_count_sum"], made["job_count_sum"])
    columns: dict[str, Any] = {
        **{name: made[name] for name in keys},
        "start_s": made["start_s_min_min"],
        "end_s": pc.if_else(open_ended, None, made["end_s_max_max"]),
        "gpus": made["gpu_fraction_max_sum"],
        "nodes": made["node_distinct"],
        "seen_s": made["seen_s_max_max"],
        "state": pc.if_else(open_ended, "running", "unknown"),
    }
    rows = [
        columns[field.name].cast(field.type) if field.name in columns
        else pa.nulls(made.num_rows, field.type)
        for field in JOBS
    ]  # fmt: skip
    return pa.concat_tables([jobs.select(JOBS.names).cast(JOBS), pa.table(rows, schema=JOBS)])


def _constant(rows: pa.Table, value: int) -> pa.Array:
    return pa.array(np.full(rows.num_rows, value))


def add_telemetry_gpus(found: JobAttempts, allocations: pa.Table | None) -> JobAttempts:
    """Give attempts of which accounting tells no GPUs those that telemetry saw them hold."""
    bare = (found.gpu_parts == 0) & (found.start_ms != UNKNOWN_TIME)
    if allocations is None or allocations.num_rows == 0 or not bare.any():
        return found
    owner = match_attempts(found, allocations)
    gpu = pc.fill_null(allocations["gpu"], -1).to_numpy().astype(np.int64)
    node = encode_text(allocations["node"]).codes
    mine = np.flatnonzero((owner >= 0) & (gpu >= 0) & (node >= 0) & bare[owner])
    owner, _, _, parts = _once(owner[mine], node[mine], gpu[mine], _parts(allocations)[mine])
    return found._replace(
        gpu_parts=found.gpu_parts + np.bincount(owner, parts, found.size).astype(np.int64)
    )


def read_allocations(
    found: JobAttempts, allocations: pa.Table | None, known: NodeInventory
) -> tuple[GpuAllocations, NodeInventory]:
    """Say where attempts hold their GPUs.

    Nodes that jobs name and no row tells of join the places: they have what is held on them.
    """
    lengths = pc.fill_null(pc.list_value_length(found.nodes), 0).to_numpy(zero_copy_only=False)
    lengths = np.where(found.gpu_parts > 0, lengths, 0).astype(np.int64)
    owners = np.flatnonzero(lengths)
    flat = encode_text(pa.chunked_array([pc.list_flatten(found.nodes.take(pa.array(owners)))]))
    attempt = np.repeat(owners, lengths[owners])
    joining = _Joining(known, found)
    place = joining.places(attempt, flat)
    share, rest = np.divmod(found.gpu_parts[attempt], np.maximum(1, lengths[attempt]))
    ordinal = np.arange(len(attempt)) - np.repeat(
        np.cumsum(lengths[owners]) - lengths[owners], lengths[owners]
    )
    loose = np.flatnonzero((lengths == 0) & (found.gpu_parts > 0))
    made = GpuAllocations(
        np.concatenate([attempt, loose]),
        np.concatenate([place, np.full(len(loose), -1)]),
        np.full(len(attempt) + len(loose), -1),
        np.concatenate([share + (ordinal < rest), found.gpu_parts[loose]]),
    )
    if allocations is not None and allocations.num_rows and found.size:
        made = _with_gpus(made, found, allocations, joining)
    return made, joining.known()


class _Joining:
    """Finds nodes by name, and adds those that are new."""

    def __init__(self, known: NodeInventory, found: JobAttempts) -> None:
        self._known, self._found = known, found
        self._index, self._pools = dict(known.node_ids), known.node_pool.tolist()

    def places(self, attempt: Ints, node: CodedColumn) -> Ints:
        """Return the node of each row; its cluster is that of the attempt."""
        cluster = self._found.cluster
        both = combine_codes(cluster.codes[attempt], node.codes, len(node.values))
        _, first, back = np.unique(both, return_index=True, return_inverse=True)
        found = np.empty(len(first), np.int64)
        for at, row in enumerate(first.tolist()):
            owner = int(attempt[row])
            name = (
                decode_text(cluster.values, cluster.codes[owner]),
                decode_text(node.values, node.codes[row]),
            )
            if name not in self._index:
                self._index[name] = len(self._index)
                self._pools.append(find_pool(self._known, self._found, owner))
            found[at] = self._index[name]
        return found[back]

    def known(self) -> NodeInventory:
        """Return the places with what was added."""
        more = len(self._index) - len(self._known.node_gpu_kind)
        return self._known._replace(
            node_ids=self._index,
            node_pool=np.array(self._pools, np.int64),
            node_gpu_kind=self._known.node_gpu_kind + (None,) * more,
        )


def _with_gpus(
    made: GpuAllocations, found: JobAttempts, allocations: pa.Table, joining: _Joining
) -> GpuAllocations:
    """Take the GPUs that are told, of attempts all of whose GPUs are told."""
    owner = match_attempts(found, allocations)
    gpu = pc.fill_null(allocations["gpu"], -1).to_numpy().astype(np.int64)
    node = encode_text(allocations["node"])
    good = np.flatnonzero((owner >= 0) & (gpu >= 0) & (node.codes >= 0))
    if len(good) == 0:
        return made
    owner, gpu = owner[good], gpu[good]
    place = joining.places(owner, CodedColumn(node.codes[good], node.values))
    told = _once(owner, place, gpu, _parts(allocations)[good])
    sums = np.bincount(told[0], told[3], found.size).astype(np.int64)
    whole = (sums == found.gpu_parts) & (sums > 0)
    keep, use = ~whole[made.attempt], whole[told[0]]
    return GpuAllocations(
        *(np.concatenate([a[keep], b[use]]) for a, b in zip(made, told, strict=True))
    )


def _parts(allocations: pa.Table) -> Ints:
    """The part of a GPU that rows tell, a whole one where that cannot be."""
    share = to_floats(allocations["gpu_fraction"])
    whole_one = ~np.isfinite(share) | (share <= 0) | (share > 1)
    return to_gpu_parts(np.where(whole_one, 1.0, share))


def _once(owner: Ints, node: Ints, gpu: Ints, parts: Ints) -> tuple[Ints, ...]:
    """Return each GPU of an attempt once, though its row may have been written anew."""
    order = np.lexsort((parts, gpu, node, owner))
    last = np.ones(len(order), np.bool_)
    last[:-1] = (
        (np.diff(owner[order]) != 0) | (np.diff(node[order]) != 0) | (np.diff(gpu[order]) != 0)
    )
    return tuple(column[order[last]] for column in (owner, node, gpu, parts))


def match_attempts(found: JobAttempts, rows: pa.Table) -> Ints:
    """Return the attempt that rows with `cluster`, `job` and `attempt` are of, or -1."""
    cluster = _codes(rows["cluster"], found.cluster.values)
    attempt = pc.fill_null(rows["attempt"], 0).to_numpy().astype(np.int64)
    owner = np.full(rows.num_rows, -1, np.int64)
    for column in (found.job, found.scheduler_id):
        job = _codes(rows["job"], column.values)
        wanted = np.where((cluster >= 0) & (job >= 0), _triple(cluster, job, attempt, found), -1)
        own = _triple(found.cluster.codes, column.codes, found.attempt, found)
        own = np.where(column.codes >= 0, own, -2)
        order = np.argsort(own, kind="stable")
        at = np.minimum(np.searchsorted(own[order], wanted), max(0, len(own) - 1))
        if len(own):
            match = (own[order][at] == wanted) & (owner < 0)
            owner[match] = order[at[match]]
    return owner


def _triple(cluster: Ints, job: Ints, attempt: Ints, found: JobAttempts) -> Ints:
    return (job * (len(found.cluster.values) + 1) + cluster) * (1 << 16) + np.clip(
        attempt, 0, (1 << 16) - 1
    )


def _codes(column: pa.ChunkedArray, values: tuple[str, ...]) -> Ints:
    found = pc.index_in(column, value_set=pa.array(values, pa.string()))
    codes: Ints = pc.fill_null(found, -1).to_numpy().astype(np.int64)
    return codes
