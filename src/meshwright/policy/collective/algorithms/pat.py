"""PAT, parallel aggregated trees: Bruck's all-gather with the farthest ranks first.

Every rank's chunk goes down a binomial tree of its own, and the trees are the same but for their
first rank, so in each step every rank sends the chunks of several trees in one message. With all of
them aggregated that is ⌈log₂ n⌉ steps; with fewer, the trees are gone through in depth, so that
chunks are passed on soon after they came (Jeaugey, arXiv:2506.20252). Reduce-scatter is the same
backwards. A value has about n rows per step: small unless n is large and `aggregate` small.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective


def build_all_gather(shape: AlgorithmShape) -> Collective:
    """Send chunks down their trees, far ranks first."""
    return _trees("all_gather", shape)


def build_reduce_scatter(shape: AlgorithmShape) -> Collective:
    """Send chunks up their trees, near ranks first."""
    return _trees("reduce_scatter", shape)


class _Step(NamedTuple):
    distance: int
    """How far every rank sends."""
    offset: int
    """How far it stands from the root of the first tree whose chunk it sends."""
    spacing: int
    """How far those roots are apart."""


def _trees(op: str, shape: AlgorithmShape) -> Collective:
    n, part = shape.ranks, shape.slots_per_share
    down = op == "all_gather"
    flow = CollectiveBuilder(
        "pat", "all_gather" if down else "reduce_scatter", ranks=n, chunks=n * part
    )
    steps = list(_steps(n, shape.aggregate))
    for step in steps if down else reversed(steps):
        chunks = [c for first in range(step.spacing) for c in range(first, n, step.spacing)]
        seat = {chunk: place for place, chunk in enumerate(chunks)}
        order = [chunk * part + index for chunk in chunks for index in range(part)]
        with flow.step_in_order(order):
            for rank in range(n):
                far = (rank + step.distance) % n
                for chunk, run in _runs(rank, step, n):
                    for channel, first, count in shape.split_over_channels(run * part):
                        at = seat[chunk] * part + first
                        if down:
                            flow.copy(rank, far, chunk=at, count=count, channel=channel)
                        else:
                            flow.add(far, rank, chunk=at, count=count, channel=channel)
    return flow.build()


def _steps(n: int, aggregate: int | None) -> Iterator[_Step]:
    """Go through the steps down the trees."""
    size = 1 << max(0, (n - 1).bit_length())
    together = min(aggregate or size, max(1, size // 2))
    together = 1 << (together.bit_length() - 1)
    spacing = size
    while spacing > size // together:
        yield _Step(spacing // 2, 0, spacing)
        spacing //= 2
    yield from (step for step in _in_depth(0, spacing, spacing) if step.offset + step.distance < n)


def _in_depth(offset: int, reach: int, spacing: int) -> Iterator[_Step]:
    """Go down a tree: send to the farthest first, and let it pass the chunk on at once."""
    distance = reach // 2
    while distance:
        yield _Step(distance, offset, spacing)
        yield from _in_depth(offset + distance, distance, spacing)
        distance //= 2


def _runs(rank: int, step: _Step, n: int) -> Iterator[tuple[int, int]]:
    """Go through the chunks a rank sends, as (lowest chunk, how many at equal distances)."""
    distance, offset, spacing = step
    left = len(range(offset, n - distance, spacing))
    highest = (rank - offset) % n
    while left:
        run = min(left, highest // spacing + 1)
        yield highest - (run - 1) * spacing, run
        left -= run
        highest += n - run * spacing
