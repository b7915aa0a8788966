"""Where GPUs are: nodes as stretches of one state, the pools that jobs are placed in."""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.account.attempts import JobAttempts
from meshwright.fleet.account.ticks import PARTS_PER_GPU, UNKNOWN_TIME, Ints, to_gpu_parts, to_ticks
from meshwright.fleet.columns import combine_codes, encode_text, to_floats

UP, DRAINING, DOWN, RESERVED, UNKNOWN = range(5)
STATE_CODES: Final = {
    "up": UP, "draining": DRAINING, "down": DOWN, "reserved": RESERVED, "unknown": UNKNOWN,
}  # fmt: skip


class NodeStateSpans(NamedTuple):
    """Nodes while they stood in one state; those of a node follow each other and never overlap."""

    node: Ints
    since_ms: Ints
    until_ms: Ints
    state: Ints
    gpu_parts: Ints
    pool: Ints
    is_assumed: Ints
    """1 where it is only taken to have been up."""


class NodeInventory(NamedTuple):
    """What is known of where GPUs are."""

    node_ids: dict[tuple[str, str], int]
    """Nodes by cluster and name."""
    node_pool: Ints
    node_gpu_kind: tuple[str | None, ...]
    spans: NodeStateSpans
    pool_names: tuple[str, ...]
    """Names of sets of nodes that jobs of the same partitions are placed on."""
    pool_by_partition: dict[tuple[str, str], int]
    """The pool of a partition."""
    pool_by_gpu_kind: dict[tuple[int, str], int]
    """The part of a pool that has another kind of GPU than most of it."""
    pool_by_cluster: dict[str, int]
    """The largest pool of a cluster, for jobs of no known partition."""


def read_inventory(nodes: pa.Table, found: JobAttempts, given: dict[str, int]) -> NodeInventory:
    """Read the nodes; `given` tells GPUs of clusters of which there are no nodes."""
    cluster, node = nodes["cluster"].to_pylist(), nodes["node"].to_pylist()
    index: dict[tuple[str, str], int] = {}
    at = np.array(
        [index.setdefault((c or "", n or ""), len(index))
         for c, n in zip(cluster, node, strict=True)],
        np.int64,
    )  # fmt: skip
    pools, pool_of, node_pool = _pools(nodes, at, index)
    kinds = _kinds(nodes, at, len(index))
    pool_of_kind = _by_kind(pools, node_pool, kinds, _pools_of_bare(found, index, node_pool))
    stretches = _stretches(nodes, at, node_pool)
    with_nodes = {name for name, _ in index}
    for name, gpus in given.items():
        if name not in with_nodes:
            stretches = _add(stretches, len(index), len(pools), gpus)
            index[name, "(all)"] = len(index)
            node_pool = np.append(node_pool, len(pools))
            pools.append(name)
            kinds = (*kinds, None)
    with_nodes = {name for name, _ in index}
    for name in (*found.cluster.values, ""):
        if name not in with_nodes and (name, "") not in pool_of:
            pools.append(name)
            pool_of[name, ""] = len(pools) - 1
    sizes = np.bincount(stretches.pool, stretches.gpu_parts.astype(float), minlength=len(pools))
    largest: dict[str, int] = {}
    for (name, _), place in index.items():
        pool = int(node_pool[place])
        if name not in largest or sizes[pool] > sizes[largest[name]]:
            largest[name] = pool
    for name in (*found.cluster.values, ""):
        largest.setdefault(name, pool_of.get((name, ""), 0))
    return NodeInventory(
        index, node_pool, kinds, stretches, tuple(pools), pool_of, pool_of_kind, largest
    )


def _add(old: NodeStateSpans, node: int, pool: int, gpus: int) -> NodeStateSpans:
    ends = (node, -(2**61), 2**61, UP, gpus * PARTS_PER_GPU, pool, 0)
    return NodeStateSpans(
        *(np.append(a, b).astype(np.int64) for a, b in zip(old, ends, strict=True))
    )


def _pools(
    nodes: pa.Table, at: Ints, index: dict[tuple[str, str], int]
) -> tuple[list[str], dict[tuple[str, str], int], Ints]:
    """Join partitions that share nodes: a job of one may take what the other has."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(name: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    own: dict[int, tuple[str, str]] = {}
    clusters = {place: cluster for (cluster, _), place in index.items()}
    lists = nodes["partitions"].to_pylist()
    for place, partitions in dict.fromkeys(
        (int(one), tuple(some or ())) for one, some in zip(at, lists, strict=True)
    ):
        cluster = clusters[place]
        for partition in partitions or ("",):
            if place not in own:
                own[place] = (cluster, partition)
            elif partition:
                parent[root((cluster, partition))] = root(own[place])
    roots = {root(name): None for name in own.values()}
    number = {name: count for count, name in enumerate(roots)}
    pool_of = {name: number[root(name)] for name in list(parent) if root(name) in number}
    titles: list[list[str]] = [[] for _ in number]
    for (_, partition), pool in pool_of.items():
        titles[pool].append(partition)
    pools = [
        f"{cluster}: {', '.join(sorted(filter(None, told)))}" if any(told) else cluster
        for (cluster, _), told in zip(number, titles, strict=True)
    ]
    return pools, pool_of, np.array([number[root(own[n])] for n in range(len(index))], np.int64)


def _kinds(nodes: pa.Table, at: Ints, count: int) -> tuple[str | None, ...]:
    """What kind of GPU each node has, as told last."""
    kind: list[str | None] = [None] * count
    for place, told in zip(at.tolist(), nodes["gpu_kind"].to_pylist(), strict=True):
        kind[place] = told or kind[place]
    return tuple(kind)


def _pools_of_bare(
    found: JobAttempts, index: dict[tuple[str, str], int], node_pool: Ints
) -> set[int]:
    """Pools of clusters in which jobs ran that tell neither their nodes nor their kind of GPU."""
    lengths = pc.fill_null(pc.list_value_length(found.nodes), 0).to_numpy(zero_copy_only=False)
    bare = (
        (found.gpu_parts > 0)
        & (lengths == 0)
        & (found.gpu_kind.codes < 0)
        & (found.start_ms != UNKNOWN_TIME)
    )
    clusters = {
        decode_text(found.cluster.values, code) for code in np.unique(found.cluster.codes[bare])
    }
    return {int(node_pool[place]) for (name, _), place in index.items() if name in clusters}


def _by_kind(
    pools: list[str], node_pool: Ints, kinds: tuple[str | None, ...], bare: set[int]
) -> dict[tuple[int, str], int]:
    """Make pools of their own of the rarer kinds of GPU, so that who waits for one finds no other.

    Where jobs ran nobody knows on what, a pool stays whole: it would not hold them in parts.
    """
    found: dict[tuple[int, str], int] = {}
    for pool in range(len(pools)):
        mine = np.flatnonzero(node_pool == pool)
        told = [(kinds[place] or "").lower() for place in mine.tolist()]
        if pool in bare or "" in told or len(set(told)) < 2:
            continue
        most = max(sorted(set(told)), key=told.count)
        for kind in sorted(set(told) - {most}):
            found[pool, kind] = len(pools)
            node_pool[mine[[one == kind for one in told]]] = len(pools)
            pools.append(f"{pools[pool]}, {kind}")
    return found


def _stretches(nodes: pa.Table, at: Ints, node_pool: Ints) -> NodeStateSpans:
    """Cut what is told of each node so that every moment has one state."""
    since, until = to_ticks(nodes["since_s"]), to_ticks(nodes["until_s"])
    since = np.where(since == UNKNOWN_TIME, -(2**61), since)
    until = np.where(until == UNKNOWN_TIME, 2**61, until)
    seen = to_ticks(nodes["seen_s"])
    order = np.lexsort((seen, since, at))
    last = np.ones(len(order), np.bool_)
    last[:-1] = (np.diff(at[order]) != 0) | (np.diff(since[order]) != 0)
    order = order[last]
    node, since, until = at[order], since[order], until[order]
    following = np.full(len(node), 2**61, np.int64)
    following[:-1] = np.where(node[1:] == node[:-1], since[1:], 2**61)
    until = np.minimum(until, following)
    gpus = to_floats(nodes["gpus"])[order]
    most = np.zeros(len(node_pool))
    np.fmax.at(most, node, np.where(np.isfinite(gpus), gpus, 0.0))
    gpus = np.where(np.isfinite(gpus), gpus, most[node])
    state = encode_text(nodes["state"])
    codes = np.array([STATE_CODES.get(text, UNKNOWN) for text in state.values] + [UNKNOWN])
    right = until > since
    found = NodeStateSpans(
        node, since, until, codes[state.codes[order]], to_gpu_parts(gpus), node_pool[node],
        np.zeros(len(node), np.int64),
    )  # fmt: skip
    return NodeStateSpans(*(column[right].astype(np.int64) for column in found))


def extend_to_first_job(known: NodeInventory, node: Ints, start: Ints) -> NodeInventory:
    """Take nodes to have been up from the first job on them, where that is before all that is told.

    Schedulers tell how nodes stand now, accounting what ran for months: a node that ran a job was
    there. `node` and `start` are of everything that jobs held.
    """
    told = known.spans
    if len(told.node) == 0:
        return known
    first = np.full(len(known.node_pool), 2**61, np.int64)
    np.minimum.at(first, node[node >= 0], start[node >= 0])
    begins = np.ones(len(told.node), np.bool_)
    begins[1:] = np.diff(told.node) != 0
    at = np.flatnonzero(begins & (first[told.node] < told.since_ms))
    more = NodeStateSpans(*(column[at] for column in told))._replace(
        since_ms=first[told.node[at]], until_ms=told.since_ms[at], state=np.full(len(at), UP),
        is_assumed=np.ones(len(at), np.int64),
    )  # fmt: skip
    both = NodeStateSpans(*(np.concatenate(pair) for pair in zip(told, more, strict=True)))
    order = np.lexsort((both.since_ms, both.node))
    return known._replace(spans=NodeStateSpans(*(column[order] for column in both)))


def find_pool(known: NodeInventory, found: JobAttempts, at: int) -> int:
    """The pool that an attempt is placed in."""
    cluster = decode_text(found.cluster.values, found.cluster.codes[at])
    partition = decode_text(found.partition.values, found.partition.codes[at])
    # Slurm tells all partitions that a waiting job asked for, with commas.
    pool = known.pool_by_cluster.get(cluster, 0)
    for name in partition.split(","):
        if (cluster, name) in known.pool_by_partition:
            pool = known.pool_by_partition[cluster, name]
            break
    kind = decode_text(found.gpu_kind.values, found.gpu_kind.codes[at]).lower()
    return known.pool_by_gpu_kind.get((pool, kind), pool)


def find_pools(known: NodeInventory, found: JobAttempts) -> Ints:
    """The pool of every attempt."""
    both = combine_codes(found.cluster.codes, found.partition.codes, len(found.partition.values))
    both = combine_codes(both, found.gpu_kind.codes, len(found.gpu_kind.values))
    distinct, first, back = np.unique(both, return_index=True, return_inverse=True)
    pools = np.array([find_pool(known, found, int(at)) for at in first], np.int64)
    return pools[back] if len(distinct) else np.empty(0, np.int64)


def decode_text(values: tuple[str, ...], code: int | np.int64) -> str:
    """The text of a code; empty where there is none."""
    return values[code] if code >= 0 else ""
