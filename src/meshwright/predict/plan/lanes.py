"""What replicas exchange around the passes of a pipeline that many ways to share have in common.

The terms are those of `buckets.around_passes`, taken apart: how late passes start for want of
parameters, and how long gradients take after them.
"""

from collections.abc import Sequence

from meshwright.predict.bubble import Edge, Pipeline, begun_s, done_s
from meshwright.predict.buckets import Held, gathered_s, reduced_s
from meshwright.predict.run import Run


class Lanes:
    """The data-parallel lanes of a pipeline, one for every rank."""

    def __init__(self, pipe: Pipeline, sizes: tuple[int, ...], split: tuple[int, ...]) -> None:
        self._edges, self._sizes, self._split = pipe.edges, sizes, split
        self._begun = [begun_s(edges) for edges in pipe.edges]
        self._done = [done_s(edges) for edges in pipe.edges]

    def before_s(self, run: Run, gathers: Sequence[float]) -> float:
        """Return how much later passes start than they could; `gathers` is that of every rank."""
        most = 0.0
        for rank, (gather_s, begun) in enumerate(zip(gathers, self._begun, strict=True)):
            if gather_s - begun > most:  # who would idle anyway waits for nothing
                edges = self._edges[rank]
                held = [
                    Held(*own, edge.first_s, edge.begun_s)
                    for own, edge in zip(self._held(edges), edges, strict=True)
                ]
                starts = gathered_s(run, gather_s, held)
                late = [start - edge.first_s for start, edge in zip(starts, edges, strict=True)]
                most = max(most, *late)
        return most

    def after_s(self, run: Run, reduces: Sequence[float]) -> float:
        """Return how long gradients are reduced after all passes; `reduces` is of every rank."""
        most = 0.0
        for rank, (reduce_s, done) in enumerate(zip(reduces, self._done, strict=True)):
            if reduce_s + done > most:
                edges = self._edges[rank]
                held = [
                    Held(*own, edge.last_s, edge.done_s)
                    for own, edge in zip(self._held(edges), edges, strict=True)
                ]
                held.sort(key=lambda one: one.end_s)
                most = max(most, reduced_s(run, reduce_s, held))
        return most

    def _held(self, edges: tuple[Edge, ...]) -> list[tuple[float, int]]:
        """Return each chunk's share of a rank's parameters, and its layers."""
        whole = sum([self._sizes[edge.chunk] for edge in edges])
        return [(self._sizes[edge.chunk] / whole, self._split[edge.chunk]) for edge in edges]
