"""What one pass over a chunk takes, and what that time is spent on.

The pieces are those of `stage_time`, cut by pass. Nothing here knows when a pass runs.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.predict.step.stage_time import ChunkTime, StageTime
from meshwright.predict.training_run.training_run import TrainingRun

PassGroup = tuple[tuple[str, int], ...]
"""Passes that start together: each by its kind (F, B, I, W or `LAST_BACKWARD`) and its chunk."""

LAST_BACKWARD = {"B": "last B", "I": "last I"}
"""The backward that ends a chunk's step, where it waits for other things than those before it."""


class PassWaits(NamedTuple):
    """Seconds that each pass over one chunk waits on top of its own time."""

    forward_dp_s: float = 0.0
    """For sharded parameters."""
    backward_dp_s: float = 0.0
    """For sharded parameters, and for gradients to be scattered."""
    last_backward_dp_s: float = 0.0
    """The same in the backward that ends the step."""
    forward_offload_s: float = 0.0
    """For transfers to and from host memory."""
    backward_offload_s: float = 0.0


NO_WAITS = PassWaits()


class PassBreakdown(NamedTuple):
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


PassTable = dict[tuple[str, int], PassBreakdown]
"""The pieces of every pass over some chunks."""


def build_pass_table(times: tuple[ChunkTime, ...], waits: tuple[PassWaits, ...]) -> PassTable:
    """Return the pieces of every kind of pass over every chunk."""
    return {
        key: pieces
        for chunk, time in enumerate(times)
        for key, pieces in _passes(time, chunk, waits[chunk])
    }


def _passes(
    time: ChunkTime, chunk: int, late: PassWaits
) -> Iterator[tuple[tuple[str, int], PassBreakdown]]:
    whole, tp, cp, ep = time
    own = whole.forward_s - tp - cp - ep
    yield (
        ("F", chunk),
        PassBreakdown(0.0, own, tp, cp, ep, late.forward_dp_s, late.forward_offload_s),
    )
    waits = whole.tp_s - tp, whole.cp_s - cp, whole.ep_s - ep
    compute = whole.backward_s - whole.recompute_s - sum(waits)
    backward = PassBreakdown(
        whole.recompute_s, compute, *waits, late.backward_dp_s, late.backward_offload_s
    )
    weight = whole.wgrad_s
    inputs = backward._replace(compute=compute - weight + whole.split_penalty_s)
    yield ("B", chunk), backward
    yield ("I", chunk), inputs
    yield ("W", chunk), PassBreakdown(compute=weight)
    if late.last_backward_dp_s != late.backward_dp_s:
        yield (LAST_BACKWARD["B"], chunk), backward._replace(dp=late.last_backward_dp_s)
        yield (LAST_BACKWARD["I"], chunk), inputs._replace(dp=late.last_backward_dp_s)


def get_group_breakdown(run: TrainingRun, table: PassTable, passes: PassGroup) -> PassBreakdown:
    """Return the pieces of passes that start together, most often of one pass alone.

    A forward and a backward each hide the other's exchange between experts; a layout that overlaps
    it hides it in every pass already.
    """
    first = table[passes[0]]
    if len(passes) == 1:
        return first
    both = PassBreakdown(*(a + b for a, b in zip(first, table[passes[1]], strict=True)))
    if run.layout.overlap_ep:
        return both
    return both._replace(ep=max(0.0, both.ep - run.constants.expert_overlap_share * both.compute))


def pass_durations_s(
    run: TrainingRun,
    times: tuple[ChunkTime, ...],
    waits: tuple[PassWaits, ...],
    groups: tuple[PassGroup, ...],
) -> tuple[float, ...]:
    """Return how long each of some groups takes: the totals of `get_group_breakdown`."""
    table: PassTable = {}
    if not run.layout.overlap_ep and any(time.total.ep_s for time in times):
        table = build_pass_table(times, waits)
    return tuple(
        get_group_breakdown(run, table, passes).total
        if table and len(passes) > 1
        else sum([_length_s(times[chunk].total, op, waits[chunk]) for op, chunk in passes])
        for passes in groups
    )


def _length_s(whole: StageTime, op: str, late: PassWaits) -> float:
    if op == "F":
        return whole.forward_s + late.forward_dp_s + late.forward_offload_s
    if op == "W":
        return whole.wgrad_s
    length = whole.backward_s + late.backward_offload_s
    length += late.last_backward_dp_s if op in _LASTS else late.backward_dp_s
    return length - (whole.wgrad_s - whole.split_penalty_s if op in _INPUTS else 0.0)


_LASTS = frozenset(LAST_BACKWARD.values())
_INPUTS = frozenset({"I", LAST_BACKWARD["I"]})
