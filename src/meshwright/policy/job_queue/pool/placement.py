"""Where on the nodes a gang goes: all of it, or nothing.

Each placement is made for a pool and is then asked for the parts of one job: which nodes, and how
many GPUs of each. All but `consolidate` may split a job that no single node has room for; jobs
larger than a node are split in any case.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from meshwright.policy.job_queue.job import QueuedJob

if TYPE_CHECKING:
    from meshwright.policy.job_queue.pool.node_pool import NodePool

NodeGpuCounts = tuple[tuple[int, int], ...]
"""Nodes, each with how many GPUs of it."""
PlacementPolicy = Callable[[QueuedJob, int], NodeGpuCounts | None]


def _fill(
    pool: "NodePool", job: QueuedJob, gpus: int, nodes: Iterable[int]
) -> NodeGpuCounts | None:
    """Take from nodes in turn until there are enough."""
    parts, left = [], gpus
    for node in nodes:
        if found := pool.count_free(job, node, left):
            parts.append((node, found))
            left -= found
            if not left:
                return tuple(parts)
    return None


def _fitting(pool: "NodePool", job: QueuedJob, gpus: int, nodes: Iterable[int]) -> list[int]:
    """Return the nodes that have room for the whole job."""
    return [
        node
        for node in nodes
        if pool.free_gpus[node] >= gpus and pool.count_free(job, node, gpus) == gpus
    ]


def _fullest_first(pool: "NodePool", nodes: Iterable[int]) -> list[int]:
    return sorted(nodes, key=lambda node: (pool.free_gpus[node], node))


def _emptiest_first(pool: "NodePool", nodes: Iterable[int]) -> list[int]:
    return sorted(nodes, key=lambda node: (-pool.free_gpus[node], node))


def _packed(
    pool: "NodePool", job: QueuedJob, gpus: int, nodes: Sequence[int]
) -> NodeGpuCounts | None:
    """One node, the one with least to spare; or as few as there can be."""
    if gpus <= pool.max_node_gpus and (fitting := _fitting(pool, job, gpus, nodes)):
        return ((min(fitting, key=lambda node: (pool.free_gpus[node], node)), gpus),)
    parts: list[tuple[int, int]] = []
    left = gpus
    rest = _emptiest_first(pool, nodes)
    while rest:
        if left <= pool.max_node_gpus and (fitting := _fitting(pool, job, left, rest)):
            node = min(fitting, key=lambda one: (pool.free_gpus[one], one))
            return (*parts, (node, left))
        node = rest.pop(0)
        if found := pool.count_free(job, node, left):
            parts.append((node, found))
            left -= found
    return None


def first_fit(pool: "NodePool", seed: int) -> PlacementPolicy:
    """The first node that has room for all of it; else the first GPUs there are."""
    del seed
    every = range(len(pool.nodes))

    def choose(job: QueuedJob, gpus: int) -> NodeGpuCounts | None:
        if gpus <= pool.max_node_gpus:
            for node in every:
                if pool.free_gpus[node] >= gpus and pool.count_free(job, node, gpus) == gpus:
                    return ((node, gpus),)
        return _fill(pool, job, gpus, every)

    return choose


def best_fit(pool: "NodePool", seed: int) -> PlacementPolicy:
    """The node that is left with least to spare; else as few nodes as there can be."""
    del seed
    every = range(len(pool.nodes))
    return lambda job, gpus: _packed(pool, job, gpus, every)


def pack(pool: "NodePool", seed: int) -> PlacementPolicy:
    """The fullest nodes first, whether or not the job is split: empty nodes stay empty."""
    del seed
    every = range(len(pool.nodes))
    return lambda job, gpus: _fill(pool, job, gpus, _fullest_first(pool, every))


def spread(pool: "NodePool", seed: int) -> PlacementPolicy:
    """The emptiest node; else one GPU after another from whoever has most."""
    del seed
    every = range(len(pool.nodes))

    def choose(job: QueuedJob, gpus: int) -> NodeGpuCounts | None:
        order = _emptiest_first(pool, every)
        if fitting := _fitting(pool, job, gpus, order[:1]):
            return ((fitting[0], gpus),)
        return _fill(pool, job, gpus, order)

    return choose


def random_fit(pool: "NodePool", seed: int) -> PlacementPolicy:
    """Any node that has room for all of it; else any nodes."""
    draw = random.Random(seed)
    every = list(range(len(pool.nodes)))

    def choose(job: QueuedJob, gpus: int) -> NodeGpuCounts | None:
        if fitting := _fitting(pool, job, gpus, every):
            return ((draw.choice(fitting), gpus),)
        return _fill(pool, job, gpus, draw.sample(every, len(every)))

    return choose


def consolidate(pool: "NodePool", seed: int) -> PlacementPolicy:
    """One node for what fits one; else empty nodes, and one more for the rest. Never scattered."""
    del seed
    every, size = range(len(pool.nodes)), max(node.gpus for node in pool.nodes)

    def choose(job: QueuedJob, gpus: int) -> NodeGpuCounts | None:
        whole, rest = divmod(gpus, size)
        if gpus <= size:
            whole, rest = 0, gpus
        parts: list[tuple[int, int]] = []
        for node in every:
            if len(parts) == whole:
                break
            if pool.free_gpus[node] == size and pool.count_free(job, node, size) == size:
                parts.append((node, size))
        if len(parts) < whole:
            return None
        if rest:
            taken = {node for node, _ in parts}
            for node in every:
                fits = pool.free_gpus[node] >= rest and pool.count_free(job, node, rest) == rest
                if fits and node not in taken:
                    return (*parts, (node, rest))
            return None
        return tuple(parts)

    return choose


def topology_aware(pool: "NodePool", seed: int) -> PlacementPolicy:
    """As near together as there is room: one node, one domain, then as few domains as can be."""
    del seed
    domains: dict[str, list[int]] = {}
    for at, node in enumerate(pool.nodes):
        domains.setdefault(node.domain, []).append(at)
    every = range(len(pool.nodes))

    def free(nodes: Iterable[int]) -> int:
        return sum(pool.free_gpus[node] for node in nodes if pool.accepts_jobs[node])

    def choose(job: QueuedJob, gpus: int) -> NodeGpuCounts | None:
        if gpus <= pool.max_node_gpus and _fitting(pool, job, gpus, every):
            return _packed(pool, job, gpus, every)
        # The domain with least to spare that holds all of it, so that others stay whole.
        for nodes in sorted(domains.values(), key=free):
            if free(nodes) >= gpus and (parts := _packed(pool, job, gpus, nodes)):
                return parts
        order = sorted(domains.values(), key=free, reverse=True)
        return _fill(pool, job, gpus, [at for one in order for at in _emptiest_first(pool, one)])

    return choose


PLACEMENT_POLICIES: Final[dict[str, Callable[["NodePool", int], PlacementPolicy]]] = {
    "consolidate": consolidate,
    "first-fit": first_fit,
    "best-fit": best_fit,
    "pack": pack,
    "spread": spread,
    "random": random_fit,
    "topology": topology_aware,
}
"""How whole GPUs are placed."""
