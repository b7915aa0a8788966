"""`SharedGpuPool`: GPUs that jobs may share, in thousandths, on nodes of many kinds.

A job asks for a part of one GPU, for whole ones of one node, or for none and only cores. Where it
goes is decided by a score of each node that has room; the best wins, and of equals the first.
Scores are whole numbers up to 100, as those of Kubernetes' scheduler.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.job import JobRequest, QueuedJob
from meshwright.policy.job_queue.pool.node_pool import NodeSpec

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
THOUSANDTHS_PER_GPU = 1000


class ResourceShape(NamedTuple):
    """What a job wants of a node."""

    gpu_thousandths: int
    """Thousandths of each GPU."""
    gpus: int
    """How many; none for jobs without."""
    cpus: float
    memory_bytes: float
    gpu_kinds: tuple[str, ...]

    @property
    def total_gpu_thousandths(self) -> int:
        """All it takes of GPUs."""
        return self.gpu_thousandths * self.gpus


def make_shape(ask: JobRequest) -> ResourceShape:
    """Return what an ask wants; parts are rounded to thousandths."""
    if ask.gpus < 1:
        part, count = round(ask.gpus * THOUSANDTHS_PER_GPU), int(ask.gpus > 0)
    else:
        part, count = THOUSANDTHS_PER_GPU, int(ask.gpus)
        if count != ask.gpus:
            what = f"it asks for {ask.gpus:g} GPUs: more than one have to be whole"
            raise InputError([Problem(f"job {ask.job_id}", what, "round it up")])
    return ResourceShape(part, count, ask.cpus, ask.memory_bytes, ask.gpu_kinds)


class NodeScorer(ABC):
    """How good nodes are for a job, and which GPU of a node it gets."""

    def __init__(self, pool: "SharedGpuPool") -> None:
        """Judge the nodes of a pool."""
        self.pool = pool

    @abstractmethod
    def score_nodes(self, shape: ResourceShape, nodes: Ints) -> Ints:
        """Return a score from 0 to 100 for each of the nodes, all of which have room."""

    def choose_gpu(self, shape: ResourceShape, node: int) -> int:
        """Return the GPU that a part is taken of: the one with least to spare."""
        left = self.pool.free_thousandths[node]
        return int(
            np.argmin(np.where(left >= shape.gpu_thousandths, left, THOUSANDTHS_PER_GPU + 1))
        )


class SharedGpuPool:
    """What is left of each GPU, and of cores and memory of each node."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        scorer: type[NodeScorer],
        *,
        seed: int = 0,
    ) -> None:
        """Begin with everything free."""
        if not nodes:
            raise InputError([Problem("nodes", "there are none", "give at least one")])
        self.nodes = tuple(nodes)
        self.kinds = sorted({node.gpu_kind for node in nodes})
        self.kind = np.array([self.kinds.index(node.gpu_kind) for node in nodes])
        self.gpus = np.array([node.gpus for node in nodes])
        self.free_thousandths: Ints = np.zeros((len(nodes), int(self.gpus.max())), dtype=np.int64)
        """Thousandths left of each GPU; a node with fewer GPUs has nothing left of the rest."""
        self.cpus = np.zeros(len(nodes))
        self.memory = np.zeros(len(nodes))
        self.changed_nodes: list[int] = []
        """Nodes in the order in which they changed."""
        self.jobs_by_node: list[dict[int, int]] = []
        """How many jobs of which kind each node has: 0 parts of a GPU, else how many GPUs."""
        self.rng = random.Random(seed)
        self.total = float(self.gpus.sum())
        self.free = self.total
        self.allowed: dict[tuple[str, ...], Flags] = {}
        self.release_all()
        self.scorer = scorer(self)

    def release_all(self) -> None:
        """Take everything back."""
        for at, node in enumerate(self.nodes):
            self.free_thousandths[at, : node.gpus] = THOUSANDTHS_PER_GPU
            self.cpus[at], self.memory[at] = node.cpus, node.memory_bytes
        self.jobs_by_node = [{} for _ in self.nodes]
        self.changed_nodes.extend(range(len(self.nodes)))
        self.free = self.total

    def list_fitting_nodes(self, shape: ResourceShape) -> Ints:
        """Return the nodes that have room for a job."""
        room = (self.cpus >= shape.cpus) & (self.memory >= shape.memory_bytes)
        if shape.gpus:
            room &= (self.free_thousandths >= shape.gpu_thousandths).sum(1) >= shape.gpus
            room &= self._of_kind(shape.gpu_kinds)
        return np.flatnonzero(room)

    def _of_kind(self, kinds: tuple[str, ...]) -> Flags:
        found = self.allowed.get(kinds)
        if found is None:
            found = self.allowed[kinds] = np.array(
                [not kinds or not node.gpu_kind or node.gpu_kind in kinds for node in self.nodes]
            )
        return found

    def allocate(self, job: QueuedJob, gpus: float | None = None) -> bool:
        """Give a job all it asks for."""
        if gpus is not None and gpus != job.gpus:
            what = "jobs on shared GPUs keep their size"
            raise InputError([Problem(f"job {job.request.job_id}", what, "use whole nodes")])
        shape = make_shape(job.request)
        nodes = self.list_fitting_nodes(shape)
        if not len(nodes):
            return False
        node = int(nodes[np.argmax(self.scorer.score_nodes(shape, nodes))])
        if shape.gpus == 0:
            parts: tuple[int, ...] = ()
        elif shape.gpu_thousandths < THOUSANDTHS_PER_GPU:
            parts = (self.scorer.choose_gpu(shape, node),)
        else:
            parts = tuple(
                int(at)
                for at in np.flatnonzero(self.free_thousandths[node] == THOUSANDTHS_PER_GPU)[
                    : shape.gpus
                ]
            )
        job.placement, job.allocated_gpus = (node, shape.gpu_thousandths, parts), job.gpus
        self.reallocate(job)
        return True

    def reallocate(self, job: QueuedJob) -> None:
        """Give a job the place it still has."""
        self._change(job, -1)

    def release(self, job: QueuedJob) -> None:
        """Take back what a job has."""
        self._change(job, 1)
        job.placement, job.allocated_gpus = None, 0.0

    def _change(self, job: QueuedJob, sign: int) -> None:
        node, part, gpus = job.placement
        for gpu in gpus:
            self.free_thousandths[node, gpu] += sign * part
        self.cpus[node] += sign * job.request.cpus
        self.memory[node] += sign * job.request.memory_bytes
        self.free += sign * part * len(gpus) / THOUSANDTHS_PER_GPU
        if gpus:
            kind = len(gpus) if part == THOUSANDTHS_PER_GPU else 0
            guests = self.jobs_by_node[node]
            guests[kind] = guests.get(kind, 0) - sign
            if not guests[kind]:
                del guests[kind]
        self.changed_nodes.append(node)

    def copy(self) -> "SharedGpuPool":
        """Return the same pool, to try things on."""
        other = object.__new__(SharedGpuPool)
        other.__dict__.update(self.__dict__)
        other.free_thousandths, other.cpus, other.memory = (
            self.free_thousandths.copy(),
            self.cpus.copy(),
            self.memory.copy(),
        )
        other.jobs_by_node, other.changed_nodes = [dict(one) for one in self.jobs_by_node], []
        other.rng = random.Random(0)
        other.scorer = type(self.scorer)(other)
        return other

    def largest_free_block(self) -> float:
        """Return the most whole GPUs that are free on one node."""
        return float((self.free_thousandths == THOUSANDTHS_PER_GPU).sum(1).max())


def find_typical_shapes(
    shapes: Iterable[ResourceShape], coverage: float = 0.95
) -> list[tuple[ResourceShape, float]]:
    """Return the commonest shapes that make up `coverage` of all, with their shares of these."""
    counts: dict[ResourceShape, int] = {}
    for shape in shapes:
        # Memory is left out: nodes have plenty of it, and it tells jobs apart for nothing.
        key = shape._replace(memory_bytes=0.0)
        counts[key] = counts.get(key, 0) + 1
    total, kept = sum(counts.values()), 0
    chosen: list[tuple[ResourceShape, int]] = []
    # Between shapes that are equally common the larger comes first.
    order = sorted(
        counts.items(),
        key=lambda one: (
            one[1],
            one[0].cpus,
            one[0].gpu_thousandths,
            one[0].gpus,
            "|".join(one[0].gpu_kinds),
        ),
        reverse=True,
    )
    for shape, count in order:
        if kept >= coverage * total:
            break
        chosen.append((shape, count))
        kept += count
    return [(shape, count / kept) for shape, count in chosen]
