"""Fragmentation: GPUs that are free and yet of no use; and a placement that makes least of it.

A typical job is drawn by how common its shape is. What is free on a node is a fragment for it where
the job does not fit there at all, and else what is left of GPUs too full for it. Fragmentation
gradient descent (Weng et al., ATC 2023) places each job where this expected amount grows least.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.job_queue.pool.shared_pool import (
    THOUSANDTHS_PER_GPU,
    Ints,
    NodeScorer,
    ResourceShape,
    SharedGpuPool,
)

_AT_ONCE = 1 << 21
"""Numbers compared at once: more of them at a time are slower for want of cache."""

TypicalShapes = Sequence[tuple[ResourceShape, float]]


class FragmentationMeter:
    """How much of what nodes have free is lost to typical jobs."""

    def __init__(self, typical: TypicalShapes, pool: SharedGpuPool) -> None:
        """Learn what jobs are typical."""
        shapes = [shape for shape, _ in typical]
        self.shape_shares = np.array([share for _, share in typical])
        self.shape_gpu_thousandths = np.array([shape.gpu_thousandths for shape in shapes])
        self.shape_gpus = np.array([shape.gpus for shape in shapes])
        self.cpus = np.array([shape.cpus for shape in shapes])
        self.is_kind_allowed = np.array(
            [
                [not one.gpu_kinds or not kind or kind in one.gpu_kinds for one in shapes]
                for kind in pool.kinds
            ]
        )
        """Whether a kind of GPU will do for a shape."""

    def measure(self, left: Ints, cpus: NDArray[np.float64], kind: Ints) -> NDArray[np.float64]:
        """Return the expected fragments of nodes, in thousandths of a GPU."""
        step = max(1, _AT_ONCE // (len(self.shape_shares) * left.shape[1]))
        pieces = [
            self._some(left[at : at + step], cpus[at : at + step], kind[at : at + step])
            for at in range(0, len(left), step)
        ]
        return np.concatenate(pieces) if pieces else np.zeros(0)

    def _some(self, left: Ints, cpus: NDArray[np.float64], kind: Ints) -> NDArray[np.float64]:
        enough = left[:, None, :] >= self.shape_gpu_thousandths[None, :, None]
        fits = (
            (enough.sum(2) >= self.shape_gpus)
            & (self.shape_gpus > 0)
            & (cpus[:, None] >= self.cpus)
            & self.is_kind_allowed[kind]
        )
        total = left.sum(1)
        useful = np.where(enough, left[:, None, :], 0).sum(2)
        amounts: NDArray[np.float64] = total - (np.where(fits, useful, 0) @ self.shape_shares)
        return amounts


def make_fgd_scorer(typical: TypicalShapes) -> type[NodeScorer]:
    """Return the scorer of fragmentation gradient descent for what jobs are typical."""

    class Descent(NodeScorer):
        """Where fragments grow least. Only nodes that have changed are judged again."""

        def __init__(self, pool: SharedGpuPool) -> None:
            super().__init__(pool)
            self.fragments = FragmentationMeter(typical, pool)
            self.judged: dict[ResourceShape, tuple[Ints, Ints, int]] = {}
            """Scores and GPUs for all nodes, and how much of the pool's log they know."""

        def score_nodes(self, shape: ResourceShape, nodes: Ints) -> Ints:
            found, _ = self._known(shape)
            return found[nodes]

        def choose_gpu(self, shape: ResourceShape, node: int) -> int:
            _, gpus = self._known(shape)
            return int(gpus[node])

        def _known(self, shape: ResourceShape) -> tuple[Ints, Ints]:
            key, log = shape._replace(memory_bytes=0.0), self.pool.changed_nodes
            count = len(self.pool.nodes)
            known = self.judged.get(key)
            if known is None:
                scores, gpus = np.zeros(count, np.int64), np.zeros(count, np.int64)
                stale = np.arange(count)
            else:
                scores, gpus, seen = known
                stale = np.unique(np.array(log[seen:], dtype=np.int64))
            if len(stale):
                scores[stale], gpus[stale] = self._judge(shape, stale)
            self.judged[key] = (scores, gpus, len(log))
            return scores, gpus

        def _judge(self, shape: ResourceShape, nodes: Ints) -> tuple[Ints, Ints]:
            pool = self.pool
            left, cpus, kind = pool.free_thousandths[nodes], pool.cpus[nodes], pool.kind[nodes]
            before = self.fragments.measure(left, cpus, kind)
            if shape.gpus == 0 or shape.gpu_thousandths == THOUSANDTHS_PER_GPU:
                after = left.copy()
                if shape.gpus:
                    free = after == THOUSANDTHS_PER_GPU
                    after[free & (free.cumsum(1) <= shape.gpus)] = 0
                grown = before - self.fragments.measure(after, cpus - shape.cpus, kind)
                return _as_score(grown), np.zeros(len(nodes), np.int64)
            width = left.shape[1]
            after = np.repeat(left, width, axis=0)
            at = np.arange(len(after))
            after[at, at % width] -= shape.gpu_thousandths
            cut = np.maximum(after, 0)
            amounts = self.fragments.measure(
                cut, np.repeat(cpus - shape.cpus, width), np.repeat(kind, width)
            )
            grown = np.repeat(before, width) - amounts
            scores = np.where(after[at, at % width] >= 0, _as_score(grown), -1)
            scores = scores.reshape(-1, width)
            return scores.max(1), scores.argmax(1)

    return Descent


def _as_score(less: NDArray[np.float64]) -> Ints:
    """Turn GPUs (in thousandths) that are no fragments any more into a score up to 100."""
    return (100.0 / (1.0 + np.exp(-less / THOUSANDTHS_PER_GPU))).astype(np.int64)
