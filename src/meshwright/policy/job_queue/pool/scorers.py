"""Scores by which jobs are placed on shared GPUs: chance, best fit, packing and their like.

The formulas are those that fragmentation gradient descent was compared with (Weng et al., ATC
2023), so that its results can be held against ours.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.job_queue.pool.shared_pool import (
    THOUSANDTHS_PER_GPU,
    Ints,
    NodeScorer,
    ResourceShape,
)

_MOST_CPUS: Final = 128.0
_MOST_GPUS: Final = 8 * THOUSANDTHS_PER_GPU
"""A large node, by which cores and GPUs are made comparable."""


class RandomScorer(NodeScorer):
    """Any node, and any GPU of it."""

    def score_nodes(self, shape: ResourceShape, nodes: Ints) -> Ints:
        """Let chance choose one of them."""
        del shape
        found = np.zeros(len(nodes), dtype=np.int64)
        found[self.pool.rng.randrange(len(nodes))] = 100
        return found

    def choose_gpu(self, shape: ResourceShape, node: int) -> int:
        """Return any GPU that has room."""
        room = np.flatnonzero(self.pool.free_thousandths[node] >= shape.gpu_thousandths)
        return int(room[self.pool.rng.randrange(len(room))])


def _cores(free: NDArray[Any]) -> NDArray[Any]:
    """Cores that are free; none where nobody tells how many there are, so that GPUs decide."""
    return np.where(np.isfinite(free), free, 0.0)


class BestFitScorer(NodeScorer):
    """The node that is left with least, cores and GPUs counting alike."""

    def score_nodes(self, shape: ResourceShape, nodes: Ints) -> Ints:
        """Score what is left over, the less the better."""
        pool = self.pool
        cpus = (_cores(pool.cpus[nodes]) - shape.cpus) / _MOST_CPUS
        gpus = (pool.free_thousandths[nodes].sum(1) - shape.total_gpu_thousandths) / _MOST_GPUS
        found: Ints = ((1.0 - 0.5 * cpus - 0.5 * gpus) * 100).astype(np.int64)
        return found


class DotProductScorer(NodeScorer):
    """The node whose room is least like the job (Tetris' alignment, turned round)."""

    def score_nodes(self, shape: ResourceShape, nodes: Ints) -> Ints:
        """Score the product of what is asked and what is there, the less the better."""
        pool = self.pool
        cpus = _cores(pool.cpus[nodes]) / _MOST_CPUS * (shape.cpus / _MOST_CPUS)
        gpus = (
            pool.free_thousandths[nodes].sum(1)
            / _MOST_GPUS
            * (shape.total_gpu_thousandths / _MOST_GPUS)
        )
        found: Ints = ((1.0 - (cpus + gpus) / 2) * 100).astype(np.int64)
        return found


class PackingScorer(NodeScorer):
    """GPUs that are shared already, then free ones of used nodes, then of unused ones."""

    def score_nodes(self, shape: ResourceShape, nodes: Ints) -> Ints:
        """Score by which of the three a node offers."""
        if not shape.gpus:
            return np.zeros(len(nodes), dtype=np.int64)
        left, gpus = self.pool.free_thousandths[nodes], self.pool.gpus[nodes]
        free = (left == THOUSANDTHS_PER_GPU).sum(1)
        # Of the GPUs that have room, those with least left are used.
        room = np.sort(
            np.where(left >= shape.gpu_thousandths, left, 2 * THOUSANDTHS_PER_GPU), axis=1
        )[:, : shape.gpus]
        fresh = (room == THOUSANDTHS_PER_GPU).sum(1)
        shared = np.maximum(100 - (room * 100 // THOUSANDTHS_PER_GPU).sum(1) // 10, 50)
        used = np.where(fresh > 0, np.maximum(50 - fresh, 33), shared)
        found: Ints = np.where(free == gpus, np.maximum(33 - free, free), used)
        return found


class ClusteringScorer(NodeScorer):
    """Nodes that have jobs of the same kind, parts of a GPU or so many of them, and no others."""

    def score_nodes(self, shape: ResourceShape, nodes: Ints) -> Ints:
        """Score by who is there already, and by how full it is."""
        if not shape.gpus:
            return np.zeros(len(nodes), dtype=np.int64)
        kind = shape.gpus if shape.gpu_thousandths == THOUSANDTHS_PER_GPU else 0
        pool = self.pool
        full = 25 * (_MOST_GPUS - pool.free_thousandths[nodes].sum(1)) // _MOST_GPUS
        company = np.empty(len(nodes), dtype=np.int64)
        for at, node in enumerate(nodes):
            guests = pool.jobs_by_node[node]
            if kind in guests:
                company[at] = 75 if len(guests) == 1 else 50
            else:
                company[at] = 0 if guests else 25
        found: Ints = full + company
        return found
