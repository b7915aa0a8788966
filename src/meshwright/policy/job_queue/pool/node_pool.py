"""`NodePool`: whole GPUs of nodes, given to gangs by a placement; nodes may fail or be drained."""

from collections.abc import Sequence

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.pool.placement import (
    PLACEMENT_POLICIES,
    NodeGpuCounts,
    PlacementPolicy,
)
from meshwright.spec.name_suggestions import build_unknown_name_problem


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with GPUs of one kind."""

    gpus: int
    gpu_kind: str = ""
    """What its GPUs are; empty: that is not told, and they do for any job."""
    domain: str = ""
    """The rack or switch it hangs on: nodes of one domain are near each other."""
    cpus: float = float("inf")
    memory_bytes: float = float("inf")


class NodePool:
    """Nodes with what is free on each."""

    def __init__(
        self, nodes: Sequence[NodeSpec], placement: str = "consolidate", *, seed: int = 0
    ) -> None:
        """Begin with everything free; `placement` is one of `PLACEMENT_POLICIES`."""
        if placement not in PLACEMENT_POLICIES:
            raise InputError(
                [
                    build_unknown_name_problem(
                        "placement", placement, list(PLACEMENT_POLICIES), "placement"
                    )
                ]
            )
        if not nodes:
            raise InputError([Problem("nodes", "there are none", "give at least one")])
        self.nodes = tuple(nodes)
        self.placement = placement
        self.kinds = sorted({node.gpu_kind for node in nodes})
        count = len(nodes)
        self.free_gpus = [node.gpus for node in nodes]
        """Free on each node, whether or not it takes jobs."""
        self.free_cpus = [node.cpus for node in nodes]
        self.free_memory = [node.memory_bytes for node in nodes]
        self.accepts_jobs = [True] * count
        """Whether a node takes new jobs."""
        self.is_up = [True] * count
        self.allowed_gpu_kinds: tuple[str, ...] = ()
        """Kinds of GPU that are given for the moment, whatever jobs ask for; empty: all."""
        self.drain_counts = [0] * count
        self.total: float = sum(self.free_gpus)
        self.free: float = self.total
        self.max_node_gpus = max(node.gpus for node in nodes)
        self.choose_placement: PlacementPolicy = PLACEMENT_POLICIES[placement](self, seed)

    def count_free(self, job: QueuedJob, node: int, gpus: int) -> int:
        """Return how many of `gpus` a node has for a job, of its kind and with their cores."""
        if not self.accepts_jobs[node]:
            return 0
        found, ask = min(gpus, self.free_gpus[node]), job.request
        kinds = self.allowed_gpu_kinds or ask.gpu_kinds
        kind = self.nodes[node].gpu_kind
        if not found or (kinds and kind and kind not in kinds):
            return 0
        if ask.cpus:
            found = min(found, int(self.free_cpus[node] * ask.gpus / ask.cpus))
        if ask.memory_bytes:
            found = min(found, int(self.free_memory[node] * ask.gpus / ask.memory_bytes))
        return found

    def allocate(self, job: QueuedJob, gpus: float | None = None) -> bool:
        """Give a job all it asks for, or `gpus`."""
        size = job.gpus if gpus is None else gpus
        if size > self.free:
            return False
        if size != int(size):
            what = f"it asks for {size:g} GPUs, and nodes give whole ones"
            raise InputError(
                [Problem(f"job {job.request.job_id}", what, "share GPUs, or round it up")]
            )
        parts = self.choose_placement(job, int(size))
        if parts is None:
            return False
        job.placement, job.allocated_gpus = parts, size
        self.reallocate(job)
        return True

    def allocate_kind(self, job: QueuedJob, kind: str) -> bool:
        """Give a job all it asks for, of one kind of GPU."""
        self.allowed_gpu_kinds = (kind,)
        try:
            return self.allocate(job)
        finally:
            self.allowed_gpu_kinds = ()

    def reallocate(self, job: QueuedJob) -> None:
        """Give a job the place it still has."""
        self._change(job, -1)

    def release(self, job: QueuedJob) -> None:
        """Take back what a job has."""
        self._change(job, 1)
        job.placement, job.allocated_gpus = None, 0.0

    def _change(self, job: QueuedJob, sign: int) -> None:
        ask, parts = job.request, job.placement
        for node, gpus in parts:
            self.free_gpus[node] += sign * gpus
            if self.accepts_jobs[node]:
                self.free += sign * gpus
            if ask.cpus:
                self.free_cpus[node] += sign * ask.cpus * gpus / ask.gpus
            if ask.memory_bytes:
                self.free_memory[node] += sign * ask.memory_bytes * gpus / ask.gpus

    def release_all(self) -> None:
        """Take everything back."""
        self.free_gpus = [node.gpus for node in self.nodes]
        self.free_cpus = [node.cpus for node in self.nodes]
        self.free_memory = [node.memory_bytes for node in self.nodes]
        self.free = sum(
            gpus for gpus, takes in zip(self.free_gpus, self.accepts_jobs, strict=True) if takes
        )

    def copy(self) -> "NodePool":
        """Return the same pool, to try things on."""
        other = object.__new__(NodePool)
        other.__dict__.update(self.__dict__)
        other.free_gpus, other.accepts_jobs = list(self.free_gpus), list(self.accepts_jobs)
        other.free_cpus, other.free_memory = list(self.free_cpus), list(self.free_memory)
        other.choose_placement = PLACEMENT_POLICIES[self.placement](other, 0)
        return other

    def largest_free_block(self) -> float:
        """Return the most GPUs that are free on one node."""
        return max(
            (gpus for gpus, takes in zip(self.free_gpus, self.accepts_jobs, strict=True) if takes),
            default=0,
        )

    def runs_on(self, job: QueuedJob, node: int) -> bool:
        """Return whether a job runs on a node."""
        return any(one == node for one, _ in job.placement)

    def find_job_speed(self, job: QueuedJob) -> float:
        """Return how fast a job is where it runs: as fast as the slowest of its GPUs."""
        speeds = job.request.speed_by_gpu_kind
        return min(speeds.get(self.nodes[node].gpu_kind, 1.0) for node, _ in job.placement)

    def find_gpu_kind(self, place: NodeGpuCounts) -> str:
        """Return the kind of GPU of a place."""
        return self.nodes[place[0][0]].gpu_kind

    def fail(self, node: int) -> None:
        """Take away a node on which nothing runs any more."""
        self._closed(node)
        self.is_up[node] = False
        self.total -= self.nodes[node].gpus

    def restore(self, node: int) -> None:
        """Bring a node back."""
        self.is_up[node] = True
        self.total += self.nodes[node].gpus
        self._opened(node)

    def drain(self, node: int) -> None:
        """Let a node take no new jobs."""
        self.drain_counts[node] += 1
        self._closed(node)

    def resume(self, node: int) -> None:
        """Let a node take jobs again."""
        self.drain_counts[node] -= 1
        self._opened(node)

    def _closed(self, node: int) -> None:
        if self.accepts_jobs[node]:
            self.accepts_jobs[node] = False
            self.free -= self.free_gpus[node]

    def _opened(self, node: int) -> None:
        if not self.accepts_jobs[node] and self.is_up[node] and not self.drain_counts[node]:
            self.accepts_jobs[node] = True
            self.free += self.free_gpus[node]


def make_uniform_nodes(
    gpus: int, per_node: int, *, per_domain: int | None = None, kind: str = ""
) -> list[NodeSpec]:
    """Return nodes that are all alike, `per_domain` of them on a switch."""
    if gpus % per_node:
        what = f"{gpus} GPUs do not fill nodes of {per_node}"
        raise InputError([Problem("gpus", what, f"use {gpus - gpus % per_node or per_node}")])
    count = gpus // per_node
    near = per_domain or count
    return [NodeSpec(gpus=per_node, gpu_kind=kind, domain=str(at // near)) for at in range(count)]
