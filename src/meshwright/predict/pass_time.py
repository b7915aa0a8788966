"""What one pass over a chunk takes, and what that time is spent on.

The pieces are those of `stage_time`, cut by pass. Nothing here knows when a pass runs.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.predict.run import Run
from meshwright.predict.stage_time import ChunkTime, StageTime

Passes = tuple[tuple[str, int], ...]
"""What starts together: each pass by its kind (F, B, I or W) and its chunk."""


class Pieces(NamedTuple):
    """Seconds of one pass by what they are spent on, in the order they are spent."""

    recompute: float = 0.0
    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    """Exposed gathers and scatters of fully sharded parameters."""

    @property
    def total(self) -> float:
        """The whole pass."""
        return self.recompute + self.compute + self.tp + self.cp + self.ep + self.dp


PassTable = dict[tuple[str, int], Pieces]
"""The pieces of every pass over some chunks."""


def pass_table(times: tuple[ChunkTime, ...], late: tuple[float, ...]) -> PassTable:
    """Return the pieces of every kind of pass over every chunk.

    `late` is, by chunk, how long a pass waits for sharded parameters per second it runs.
    """
    return {
        key: pieces
        for chunk, time in enumerate(times)
        for key, pieces in _passes(time, chunk, late[chunk])
    }


def _passes(time: ChunkTime, chunk: int, late: float) -> Iterator[tuple[tuple[str, int], Pieces]]:
    whole, tp, cp, ep = time
    yield (
        ("F", chunk),
        Pieces(0.0, whole.forward - tp - cp - ep, tp, cp, ep, late * whole.forward),
    )
    waits = whole.tp - tp, whole.cp - cp, whole.ep - ep
    compute = whole.backward - whole.recompute - sum(waits)
    backward = Pieces(whole.recompute, compute, *waits, late * whole.backward)
    weight = whole.weight_gradient
    yield ("B", chunk), backward
    yield ("I", chunk), backward._replace(compute=compute - weight)
    yield ("W", chunk), Pieces(compute=weight)


def together(run: Run, table: PassTable, passes: Passes) -> Pieces:
    """Return the pieces of passes that start together, most often of one pass alone.

    A forward and a backward each hide the other's exchange between experts; a layout that overlaps
    it hides it in every pass already.
    """
    first = table[passes[0]]
    if len(passes) == 1:
        return first
    both = Pieces(*(a + b for a, b in zip(first, table[passes[1]], strict=True)))
    if run.layout.overlap_ep:
        return both
    return both._replace(ep=max(0.0, both.ep - run.constants.expert_hidden * both.compute))


def lengths_s(
    run: Run, times: tuple[ChunkTime, ...], late: tuple[float, ...], groups: tuple[Passes, ...]
) -> tuple[float, ...]:
    """Return how long each of some groups takes: the totals of `together`, without the pieces."""
    table: PassTable = {}
    if not run.layout.overlap_ep and any(time.whole.ep for time in times):
        table = pass_table(times, late)
    return tuple(
        together(run, table, passes).total
        if table and len(passes) > 1
        else sum([_length_s(times[chunk].whole, op, late[chunk]) for op, chunk in passes])
        for passes in groups
    )


def _length_s(whole: StageTime, op: str, late: float) -> float:
    if op == "F":
        return whole.forward * (1 + late)
    if op == "W":
        return whole.weight_gradient
    return whole.backward * (1 + late) - (whole.weight_gradient if op == "I" else 0.0)
