"""What one pass over a chunk takes, and what that time is spent on.

The pieces are those of `stage_time`, cut by pass. Nothing here knows when a pass runs.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.predict.run import Run
from meshwright.predict.stage_time import ChunkTime, StageTime

Passes = tuple[tuple[str, int], ...]
"""What starts together: each pass by its kind (F, B, I or W, or of `LAST`) and its chunk."""

LAST = {"B": "last B", "I": "last I"}
"""The backward that ends a chunk's step, where it waits for other things than those before it."""


class Waits(NamedTuple):
    """Seconds that each pass over one chunk waits on top of its own time."""

    forward_dp: float = 0.0
    """For sharded parameters."""
    backward_dp: float = 0.0
    """For sharded parameters, and for gradients to be scattered."""
    last_dp: float = 0.0
    """The same in the backward that ends the step."""
    forward_offload: float = 0.0
    """For transfers to and from host memory."""
    backward_offload: float = 0.0


NO_WAITS = Waits()


class Pieces(NamedTuple):
    """Seconds of one pass by what they are spent on, in the order they are spent."""

    recompute: float = 0.0
    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    """Exposed gathers of sharded parameters and scatters of their gradients."""
    offload: float = 0.0
    """Exposed transfers to and from host memory."""

    @property
    def total(self) -> float:
        """The whole pass."""
        return self.recompute + self.compute + self.tp + self.cp + self.ep + self.dp + self.offload


PassTable = dict[tuple[str, int], Pieces]
"""The pieces of every pass over some chunks."""


def pass_table(times: tuple[ChunkTime, ...], waits: tuple[Waits, ...]) -> PassTable:
    """Return the pieces of every kind of pass over every chunk."""
    return {
        key: pieces
        for chunk, time in enumerate(times)
        for key, pieces in _passes(time, chunk, waits[chunk])
    }


def _passes(time: ChunkTime, chunk: int, late: Waits) -> Iterator[tuple[tuple[str, int], Pieces]]:
    whole, tp, cp, ep = time
    own = whole.forward - tp - cp - ep
    yield ("F", chunk), Pieces(0.0, own, tp, cp, ep, late.forward_dp, late.forward_offload)
    waits = whole.tp - tp, whole.cp - cp, whole.ep - ep
    compute = whole.backward - whole.recompute - sum(waits)
    backward = Pieces(whole.recompute, compute, *waits, late.backward_dp, late.backward_offload)
    weight = whole.weight_gradient
    inputs = backward._replace(compute=compute - weight + whole.split)
    yield ("B", chunk), backward
    yield ("I", chunk), inputs
    yield ("W", chunk), Pieces(compute=weight)
    if late.last_dp != late.backward_dp:
        yield (LAST["B"], chunk), backward._replace(dp=late.last_dp)
        yield (LAST["I"], chunk), inputs._replace(dp=late.last_dp)


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
    run: Run, times: tuple[ChunkTime, ...], waits: tuple[Waits, ...], groups: tuple[Passes, ...]
) -> tuple[float, ...]:
    """Return how long each of some groups takes: the totals of `together`, without the pieces."""
    table: PassTable = {}
    if not run.layout.overlap_ep and any(time.whole.ep for time in times):
        table = pass_table(times, waits)
    return tuple(
        together(run, table, passes).total
        if table and len(passes) > 1
        else sum([_length_s(times[chunk].whole, op, waits[chunk]) for op, chunk in passes])
        for passes in groups
    )


def _length_s(whole: StageTime, op: str, late: Waits) -> float:
    if op == "F":
        return whole.forward + late.forward_dp + late.forward_offload
    if op == "W":
        return whole.weight_gradient
    length = whole.backward + late.backward_offload
    length += late.last_dp if op in _LASTS else late.backward_dp
    return length - (whole.weight_gradient - whole.split if op in _INPUTS else 0.0)


_LASTS = frozenset(LAST.values())
_INPUTS = frozenset({"I", LAST["I"]})
