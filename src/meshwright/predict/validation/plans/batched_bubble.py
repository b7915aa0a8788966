"""`predict.step.pipeline_bubble` for many pipelines at once.

Pipelines that run the same schedule differ only in how long passes and transfers take, so one walk
through the schedule serves all of them, a column of an array for each. Same order of the same sums:
the outcome is that of `bubble.pipeline` for runs whose passes wait for nothing but their own
communication.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.policy.pipeline.interleaved_1f1b import get_default_group_size
from meshwright.predict.step.pass_time import NO_WAITS, pass_durations_s
from meshwright.predict.step.pipeline_bubble import (
    _SMALL,
    NO_BARRIER_SCHEDULES,
    ChunkEdgeTimes,
    PipelineBubble,
    _few,
    _Order,
    _order,
    mean_transfer_s,
    predict_bubble,
)
from meshwright.predict.step.schedule_graph import NOWHERE
from meshwright.predict.step.stage_time import ChunkTime
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import ScheduleKind

Floats = npt.NDArray[np.float64]

_WORTH = 6
"""So few pipelines are quicker one by one."""
_AT_ONCE = 6_000_000
"""Passes that are held at a time: about a hundred megabytes."""


class BubbleInput(NamedTuple):
    """A run and what its chunks take."""

    run: TrainingRun
    times: tuple[ChunkTime, ...]

    def predict_one(self) -> PipelineBubble:
        """Return its pipeline, worked out by itself."""
        return predict_bubble(self.run, self.times, (NO_WAITS,) * len(self.times))


def predict_bubbles(flows: Sequence[BubbleInput]) -> list[PipelineBubble]:
    """Return the pipeline of every flow."""
    alike: dict[_Kind | None, list[int]] = {}
    for index, (run, _) in enumerate(flows):
        layout, count = run.layout, run.num_microbatches
        kind = None
        if layout.pp > 1 and layout.schedule not in NO_BARRIER_SCHEDULES:
            group = (
                get_default_group_size(layout.pp, count)
                if layout.schedule == "interleaved"
                else None
            )
            few, round_ = _few(layout.schedule, layout.pp, count)
            kind = _Kind(layout.schedule, layout.pp, layout.virtual_stages, few, round_, group)
        alike.setdefault(kind, []).append(index)
    found: dict[int, PipelineBubble] = {}
    for kind, members in alike.items():
        if kind is None or len(members) < _WORTH:
            found.update((index, flows[index].predict_one()) for index in members)
            continue
        together = _Together(kind)
        for first in range(0, len(members), together.width):
            some = members[first : first + together.width]
            solved = together.solve([flows[index] for index in some])
            found.update(zip(some, solved, strict=True))
    return [found[index] for index in range(len(flows))]


class _Kind(NamedTuple):
    """A schedule, as far as it is walked through."""

    schedule: ScheduleKind
    pp: int
    per_rank: int
    few: int
    """Microbatches that are worked out."""
    round: int
    """Of how many of them the last give the pace."""
    group: int | None

    def order(self, microbatches: int) -> _Order:
        """Return what runs after what for so many microbatches."""
        kind, pp, per_rank = self[:3]
        return _order(kind, pp, per_rank, microbatches, group=self.group, apart=False)


class _Together:
    """The pipelines of one schedule."""

    def __init__(self, kind: _Kind) -> None:
        self.per_rank, self.few, self.round = kind.per_rank, kind.few, kind.round
        self.long, self._kind = kind.order(kind.few), kind
        self.width = max(_WORTH, _AT_ONCE // len(self.long.rows))

    @property
    def short(self) -> _Order:
        """The same schedule a round shorter, which gives the pace."""
        return self._kind.order(self.few - self.round)

    def solve(self, flows: list[BubbleInput]) -> list[PipelineBubble]:
        """Return the pipelines of some flows."""
        # Beside every flow walks the same without transfers, to see how much of it these cost.
        # Flows with the same passes come to the same then.
        first: dict[int, int] = {}
        for index, (_, times) in enumerate(flows):
            first.setdefault(id(times), index)
        place = {key: len(flows) + at for at, key in enumerate(first)}
        instant = [place[id(times)] for _, times in flows]
        every = [*flows, *(flows[index] for index in first.values())]
        counts = np.array([run.num_microbatches for run, _ in every])
        hops = np.array([mean_transfer_s(run) for run, _ in flows] + [0.0] * len(first))
        overlaps = np.array([run.layout.overlap_pp for run, _ in flows] + [True] * len(first))
        ends, busy, edges = self._walked(every, counts - self.few, hops, overlaps)
        some = slice(len(flows))
        end, hop = ends[some], hops[some]
        transfers = 2 * (len(flows[0].times) - 1) * hop  # one microbatch there and back
        much = transfers + 2 * counts[some] * self.per_rank * hop > _SMALL * end
        transfers = np.where(much, end - ends[instant], transfers)
        most = busy.max(axis=0)[some]
        numbers = (busy.argmax(axis=0)[some], most, end, np.minimum(transfers, end - most))
        columns = zip(*(part.tolist() for part in numbers), strict=True)
        return [
            PipelineBubble(busiest, busy_s, end_s, transfers_s, own)
            for (busiest, busy_s, end_s, transfers_s), own in zip(
                columns, _edges(self.long, edges, some), strict=True
            )
        ]

    def _walked(
        self, flows: list[BubbleInput], left: Any, hops: Floats, overlaps: Any
    ) -> tuple[Floats, Floats, "_Marks"]:
        """Return when all passes are done, how long those of every rank take, and the edges."""
        lengths = _lengths(self.long, flows)
        end, edges = _done(self.long, lengths, hops, overlaps)
        busy = _busy(self.long, lengths)
        if left.any():
            before_lengths = lengths
            if self.short.groups is not self.long.groups:
                before_lengths = _lengths(self.short, flows)
            before, _ = _done(self.short, before_lengths, hops, overlaps)
            grown = busy - _busy(self.short, before_lengths)
            pace = np.maximum(end - before, grown.max(axis=0)) / self.round
            # Nor does a step grow slower than what a rank sends one by one.
            pace = np.maximum(pace, np.where(overlaps, 2 * self.per_rank * hops, 0.0))
            end = end + left * pace
            busy = busy + left / self.round * grown
        return end, busy, edges


def _lengths(order: _Order, flows: list[BubbleInput]) -> Floats:
    """Return how long every group of passes takes, a column for each flow."""
    known: dict[int, tuple[float, ...]] = {}
    columns = []
    for run, times in flows:
        key = id(times)
        if key not in known:
            known[key] = pass_durations_s(run, times, (NO_WAITS,) * len(times), order.groups)
        columns.append(known[key])
    return np.array(columns).T


def _busy(order: _Order, lengths: Floats) -> Floats:
    busy = np.zeros((order.ranks, lengths.shape[1]))
    for rank, group, often in order.counts:
        busy[rank] += often * lengths[group]
    return busy


class _Marks(NamedTuple):
    """When the first and the last pass of every rank's chunks start and end, and the end of all."""

    first: Floats
    begun: Floats
    last: Floats
    done: Floats


def _done(order: _Order, lengths: Floats, hops: Floats, overlaps: Any) -> tuple[Floats, _Marks]:
    # Who waits for its own transfers has longer passes, and the receiver waits no more.
    waits, hop = np.where(overlaps, 0.0, hops), np.where(overlaps, hops, 0.0)
    return _clock(order, lengths + np.array(order.sends)[:, None] * waits, hop)


def _clock(order: _Order, lengths: Floats, hop: Floats) -> tuple[Floats, _Marks]:
    """Walk through the schedule as `bubble` does, with an array in the place of every number."""
    later, took = np.maximum, list(lengths)
    zero = np.zeros(lengths.shape[1])
    free = [zero] * order.ranks
    comes = [zero] * (order.messages + 2)
    ends = []
    for rank, group, need, other_need, give, other_give in order.rows:
        start = free[rank]
        if need:
            start = later(start, comes[need])
        if other_need:
            start = later(start, comes[other_need])
        free[rank] = end = start + took[group]
        ends.append(end)
        if give != NOWHERE:
            comes[give] = end + hop
        if other_give != NOWHERE:
            comes[other_give] = end + 2 * hop  # behind the first on the same lane
    whole = np.max(free, axis=0)
    marks = [(first, last) for _, first, last in chain.from_iterable(order.edges)]
    begun = np.array([ends[first] for first, _ in marks])
    done = np.array([ends[last] for _, last in marks])
    first = begun - lengths[[order.rows[first][1] for first, _ in marks]]
    last = done - lengths[[order.rows[last][1] for _, last in marks]]
    return whole, _Marks(first, begun, last - whole, done - whole)


def _edges(
    order: _Order, marks: _Marks, some: slice
) -> list[tuple[tuple[ChunkEdgeTimes, ...], ...]]:
    """Return the edges of some flows."""
    columns = zip(*(part.T[some].tolist() for part in marks), strict=True)
    named = [[chunk for chunk, _, _ in some] for some in order.edges]
    found = []
    for four in columns:
        rows = zip(*four, strict=True)
        found.append(
            tuple([tuple([ChunkEdgeTimes(chunk, *next(rows)) for chunk in some]) for some in named])
        )
    return found
