"""The clock of ranks that have no core each: whoever has work on a core gets an equal part of it.

A pass then has no length of its own. It needs so much time of a core, and takes longer while others
compute beside it; a rank that waits leaves its part to them, so what is a bubble where each has a
core is hardly one here. The exchange of gradients takes its turn as passes do: that of a stage that
is done with its passes slows down the passes of others.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.predict.event_sim.dp_comm import BucketTransfer
from meshwright.predict.step.schedule_graph import (
    NOTHING,
    NOWHERE,
    ActionRow,
    ActionTimes,
    ScheduleGraph,
)
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_coordinate

_FIRST_MESSAGE = 2
_NOTICED = 1e-12
"""Part of a pass that is taken for none: what rounding leaves."""


class CoreAssignment(NamedTuple):
    """Where the rank that stands for a pipeline stage computes."""

    core: int
    ranks_on_core: int
    """Ranks of its stage there, itself among them: all have work at the same time."""


def assign_cores(layout: Layout, cores: int) -> list[CoreAssignment]:
    """Return where each stage's first rank is, ranks being dealt out to cores in turn."""
    on_core: dict[tuple[int, int], int] = {}
    first: dict[int, int] = {}
    for rank in range(layout.gpus):
        stage = get_coordinate(layout, rank).pp
        first.setdefault(stage, rank % cores)
        on_core[stage, rank % cores] = on_core.get((stage, rank % cores), 0) + 1
    return [
        CoreAssignment(first[stage], on_core[stage, first[stage]]) for stage in range(layout.pp)
    ]


class SharedCoreTimes(NamedTuple):
    """When everything happened."""

    action_times: ActionTimes[float]
    finish_s: list[float]
    """By rank, when what it does after its last pass was over."""


def run_on_shared_cores(
    plan: ScheduleGraph,
    core_s: Sequence[float],
    hop_s: float,
    seats: Sequence[CoreAssignment],
    *,
    after_s: Sequence[float],
    blocking: bool,
    not_before_s: Mapping[int, float],
) -> SharedCoreTimes:
    """Run every rank's actions in order as `clock` does, on cores that ranks share.

    Args:
        plan: What runs after what.
        core_s: How much of a core each action needs, by its place.
        hop_s: How long a transfer takes. A rank's transfers leave one after the other.
        seats: The core of each pipeline rank.
        after_s: How much of a core each rank needs after its last pass.
        blocking: Whether a rank computes on only when what it sent has arrived.
        not_before_s: Earliest starts of single actions, by place.
    """
    turns = _Turns(plan, core_s, seats, hop_s=hop_s, blocking=blocking, floors_s=not_before_s)
    return turns.run(after_s)


def extend_reductions(
    buckets: Iterable[BucketTransfer], ends_s: Sequence[float]
) -> list[BucketTransfer]:
    """Return reductions of gradients, those of each rank ending with the time it took by turns."""
    own: dict[int, list[BucketTransfer]] = {}
    for bucket in buckets:
        own.setdefault(bucket.rank, []).append(bucket)
    found = []
    for rank, lane in own.items():
        first, last = lane[0].start_s, max(bucket.end_s for bucket in lane)
        times = (ends_s[rank] - first) / (last - first)
        found += [
            bucket._replace(
                start_s=first + times * (bucket.start_s - first),
                end_s=first + times * (bucket.end_s - first),
            )
            for bucket in lane
        ]
    return found


class _Turns:
    """Who computes what, at one moment after another."""

    def __init__(
        self,
        plan: ScheduleGraph,
        core_s: Sequence[float],
        seats: Sequence[CoreAssignment],
        *,
        hop_s: float,
        blocking: bool,
        floors_s: Mapping[int, float],
    ) -> None:
        self._plan, self._core_s, self._hop_s, self._seats = plan, core_s, hop_s, seats
        self._blocking, self._floors_s = blocking, floors_s
        self._lanes: list[list[ActionRow]] = [[] for _ in range(plan.ranks)]
        for row in reversed(plan.rows):
            self._lanes[row[0]].append(row)  # the next one to run is the last of its list
        messages = len(plan.transfers) + _FIRST_MESSAGE
        self._comes: list[float | None] = [None] * messages
        self._comes[NOTHING] = 0.0
        self._leaves = [0.0] * messages
        self._starts, self._ends = [0.0] * plan.num_actions, [0.0] * plan.num_actions
        self._free, self._line = [0.0] * plan.ranks, [0.0] * plan.ranks
        self._left: dict[int, float] = {}
        """By rank, what its pass still needs of a core."""
        self._exchanged = [0.0] * plan.ranks

    def run(self, after_s: Sequence[float]) -> SharedCoreTimes:
        now = 0.0
        while True:
            waits = self._begin(now)
            pace = self._pace()
            moments = [now + left / pace[rank] for rank, left in self._left.items()]
            if not moments and not waits:
                break
            then = min((*moments, *waits))
            for rank in list(self._left):
                self._left[rank] -= (then - now) * pace[rank]
                if self._left[rank] > _NOTICED:
                    continue
                del self._left[rank]
                if not self._lanes[rank]:
                    self._exchanged[rank] = then
                    continue
                self._end(rank, then)
                if not self._lanes[rank]:
                    self._left[rank] = after_s[rank]
            now = then
        comes = [each or 0.0 for each in self._comes]
        passes = ActionTimes(
            self._starts, self._ends, self._leaves[_FIRST_MESSAGE:], comes[_FIRST_MESSAGE:]
        )
        return SharedCoreTimes(passes, self._exchanged)

    def _begin(self, now: float) -> list[float]:
        """Start what can start; return when other ranks will be able to, as far as it is known."""
        waits = []
        for rank, lane in enumerate(self._lanes):
            if rank in self._left or not lane:
                continue
            ready = self._ready(rank, lane[-1])
            if ready is None:
                continue
            if ready > now:
                waits.append(ready)
                continue
            place = lane[-1][2]
            self._starts[place] = now
            self._left[rank] = self._core_s[place]
        return waits

    def _ready(self, rank: int, row: ActionRow) -> float | None:
        _, _, place, need, other_need, _, _ = row
        ready = max(self._free[rank], self._floors_s.get(place, 0.0))
        for key in (need, other_need):
            comes = self._comes[key]
            if comes is None:
                return None
            ready = max(ready, comes)
        return ready

    def _pace(self) -> dict[int, float]:
        """Return what part of a core each rank gets now."""
        crowd: dict[int, int] = {}
        for rank in self._left:
            seat = self._seats[rank]
            crowd[seat.core] = crowd.get(seat.core, 0) + seat.ranks_on_core
        return {rank: 1.0 / crowd[self._seats[rank].core] for rank in self._left}

    def _end(self, rank: int, now: float) -> None:
        _, kind, place, _, _, give, other_give = self._lanes[rank].pop()
        self._ends[place] = self._free[rank] = now
        if len(self._plan.groups[kind]) > 1:
            self._starts[place + 1], self._ends[place + 1] = self._starts[place], now
        for key in (give, other_give):
            if key == NOWHERE:
                break
            self._leaves[key] = max(now, self._line[rank])
            self._comes[key] = self._line[rank] = comes = self._leaves[key] + self._hop_s
            if self._blocking:
                self._free[rank] = comes
