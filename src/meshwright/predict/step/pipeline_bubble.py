"""How long a pipeline idles and waits for transfers, fast enough for a search.

A schedule settles into a steady pace after some microbatches for every rank. So it is worked out
pass by pass for a few microbatches per rank, and what is left of the step runs at the pace of the
last of them. That holds for every schedule and for stages of any length; the event simulation,
which runs every microbatch, says how well.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from meshwright.policy.pipeline import build_schedule
from meshwright.policy.pipeline.interleaved_1f1b import get_default_group_size
from meshwright.predict.network import collective_s
from meshwright.predict.step.block_comm import list_neighbor_placements
from meshwright.predict.step.pass_time import LAST_BACKWARD, PassGroup, PassWaits, pass_durations_s
from meshwright.predict.step.schedule_graph import (
    NOWHERE,
    build_schedule_graph,
    split_last_backward,
)
from meshwright.predict.step.stage_time import ChunkTime, StageTime, stage_transfer_bytes
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import ScheduleKind, list_chunks_by_rank

_ROUNDS = {"zb-h2": 4}
"""Microbatches per rank that are worked out: three, more where the warm-up is twice as long."""

_SMALL = 0.01
"""Share of a step below which it is not worked out exactly how much of it transfers cost."""

NO_BARRIER_SCHEDULES = frozenset({"zb-h1", "zb-h2", "zb-v"})
"""Schedules whose ranks update without waiting for each other, because the gradient norm is
validated afterwards (Qi et al. 2024, arXiv 2401.10241, section 4)."""


class ChunkEdgeTimes(NamedTuple):
    """When a rank begins and ends with one of its chunks."""

    chunk: int
    first_forward_start_s: float
    """When its first forward starts, from the start of all passes."""
    first_forward_end_s: float
    """When that ends."""
    last_backward_start_s: float
    """When the backward starts that completes its gradients, to the end of all passes."""
    last_backward_end_s: float
    """When that ends; 0 where it is the last of all passes, less where others follow."""


class PipelineBubble(NamedTuple):
    """What a pipeline adds to the passes of its busiest rank."""

    busiest_rank: int
    """The rank with the most work."""
    busy_s: float
    """How long its passes take: less than one by one, where two hide each other's exchange."""
    end_s: float
    """How long all passes take; where ranks end apart, the longest that one rank takes."""
    transfers_s: float
    """How much of that is due to transfers."""
    chunk_edges: tuple[tuple[ChunkEdgeTimes, ...], ...]
    """The chunks of each rank, in the order they are begun."""


def skips_optimizer_barrier(run: TrainingRun) -> bool:
    """Whether ranks update their weights without waiting for all others."""
    layout = run.layout
    return (
        layout.schedule in NO_BARRIER_SCHEDULES
        and layout.pp > 1
        and run.framework.skip_optimizer_barrier
    )


def first_start_s(edges: tuple[ChunkEdgeTimes, ...]) -> float:
    """Return when a rank begins, from the start of all passes."""
    return edges[0].first_forward_start_s


def last_end_s(edges: tuple[ChunkEdgeTimes, ...]) -> float:
    """Return when a rank is done, to the end of all passes."""
    return max([edge.last_backward_end_s for edge in edges])


def mean_transfer_s(run: TrainingRun) -> float:
    """Return how long that takes, on the mean over all stages."""
    if run.layout.pp == 1:
        return 0.0
    if run.measured is not None:
        return run.measured.stage_transfer.predict_s(stage_transfer_bytes(run))
    pairs, size = list_neighbor_placements(run.cluster, run.layout, "pp"), stage_transfer_bytes(run)
    whole = sum(often * collective_s(pair, "send_recv", size) for pair, often in pairs)
    return whole / (run.layout.pp - 1)


def sum_rank_times(run: TrainingRun, times: tuple[ChunkTime, ...]) -> tuple[StageTime, ...]:
    """Return what one pass each way over all chunks of a rank costs."""
    if not has_multiple_chunks(run):
        return tuple(time.total for time in times)
    held = list_chunks_by_rank(run.layout, run.model.layers)
    return tuple(_sum([times[chunk.position].total for chunk in some]) for some in held)


def has_multiple_chunks(run: TrainingRun) -> bool:
    """Whether ranks hold more than one chunk."""
    layout = run.layout
    return layout.virtual_stages > 1 or (layout.schedule == "dualpipe" and layout.pp > 1)


def _sum(some: list[StageTime]) -> StageTime:
    return some[0] if len(some) == 1 else StageTime(*map(sum, zip(*some, strict=True)))


def mean_per_microbatch(run: TrainingRun, stage: StageTime) -> StageTime:
    """Return what a microbatch costs a rank on average.

    DualPipe feeds from both ends: a rank holds two chunks, and each sees half of the microbatches.
    """
    if run.layout.schedule != "dualpipe" or run.layout.pp == 1:
        return stage
    return StageTime(*(part / 2 for part in stage))


def predict_bubble(
    run: TrainingRun, times: tuple[ChunkTime, ...], waits: tuple[PassWaits, ...]
) -> PipelineBubble:
    """Return what the layout's schedule adds to the passes of its busiest rank.

    `waits` is, by chunk, what passes wait for beside their own communication.
    """
    layout, count = run.layout, run.num_microbatches
    if layout.pp == 1:
        late, (forward, backward) = waits[0], times[0].total[:2]
        forward += late.forward_dp_s + late.forward_offload_s
        last = backward + late.last_backward_dp_s + late.backward_offload_s
        backward += late.backward_dp_s + late.backward_offload_s
        end = count * forward + (count - 1) * backward + last
        return PipelineBubble(0, end, end, 0.0, ((ChunkEdgeTimes(0, 0.0, forward, -last, 0.0),),))
    passes = _Passes(run, times, waits)
    end, edges = passes.step()
    busy = passes.busy()
    busiest = max(range(layout.pp), key=busy.__getitem__)
    transfers = 2 * (len(times) - 1) * passes.hop  # one microbatch there and back
    most = transfers + 2 * count * layout.virtual_stages * passes.hop
    if most > _SMALL * end:
        transfers = end - passes.step(instant=True)[0]
    if skips_optimizer_barrier(run):
        end += max(last_end_s(own) - first_start_s(own) for own in edges)
    return PipelineBubble(busiest, busy[busiest], end, min(transfers, end - busy[busiest]), edges)


def _few(kind: ScheduleKind, pp: int, count: int) -> tuple[int, int]:
    """Return how many microbatches to work out, and of how many the last give the pace.

    What is left out has to fit the schedule's rhythm.
    """
    round_ = get_default_group_size(pp, count) if kind == "interleaved" else pp
    rhythm = {"interleaved": round_, "dualpipe": 2}.get(kind, 1)
    most = max((_ROUNDS.get(kind, 3) - 1) * pp, round_) + round_
    return (count if count <= most else most + (count - most) % rhythm), round_


class _Passes:
    """The passes of a run, and what the schedule makes of them for some microbatches."""

    def __init__(
        self, run: TrainingRun, times: tuple[ChunkTime, ...], waits: tuple[PassWaits, ...]
    ) -> None:
        self._run, self._times, self._waits = run, times, waits
        self._apart = run.layout.zero == 2 and any(
            one.last_backward_dp_s != one.backward_dp_s for one in waits
        )
        self.hop = mean_transfer_s(run)
        self._few, self._round = _few(run.layout.schedule, run.layout.pp, run.num_microbatches)
        self._left = run.num_microbatches - self._few
        self._lengths: dict[int, tuple[float, ...]] = {}

    def _order(self, microbatches: int) -> "_Order":
        layout, group = self._run.layout, None
        if layout.schedule == "interleaved":
            group = get_default_group_size(layout.pp, self._run.num_microbatches)
        kind, chunks = layout.schedule, layout.virtual_stages
        return _order(kind, layout.pp, chunks, microbatches, group=group, apart=self._apart)

    def _lengths_s(self, order: "_Order") -> tuple[float, ...]:
        known = self._lengths.get(id(order.groups))
        if known is None:
            known = pass_durations_s(self._run, self._times, self._waits, order.groups)
            self._lengths[id(order.groups)] = known
        return known

    def busy(self) -> list[float]:
        """Return how long the passes of every rank take."""
        found = self._busy(self._few)
        if self._left:
            before = self._busy(self._few - self._round)
            share = self._left / self._round
            found = [b + share * (b - a) for a, b in zip(before, found, strict=True)]
        return found

    def _busy(self, microbatches: int) -> list[float]:
        order = self._order(microbatches)
        lengths = self._lengths_s(order)
        busy = [0.0] * order.ranks
        for rank, group, often in order.counts:
            busy[rank] += often * lengths[group]
        return busy

    def step(
        self, *, instant: bool = False
    ) -> tuple[float, tuple[tuple[ChunkEdgeTimes, ...], ...]]:
        """Return when all passes are done, and the edges; transfers may take no time."""
        end, edges = self._done(self._few, instant)
        if self._left:
            short = self._few - self._round
            before = self._done(short, instant)[0]
            grown = [b - a for a, b in zip(self._busy(short), self._busy(self._few), strict=True)]
            layout, pace = self._run.layout, max(end - before, *grown) / self._round
            if layout.overlap_pp and not instant:
                # Nor does a step grow slower than what a rank sends one by one.
                pace = max(pace, 2 * layout.virtual_stages * self.hop)
            end += self._left * pace
        return end, edges

    def _done(
        self, microbatches: int, instant: bool
    ) -> tuple[float, tuple[tuple[ChunkEdgeTimes, ...], ...]]:
        order, hop = self._order(microbatches), 0.0 if instant else self.hop
        lengths = self._lengths_s(order)
        if hop and not self._run.layout.overlap_pp:
            # Who waits for its own transfers has longer passes, and the receiver waits no more.
            lengths = tuple(one + n * hop for one, n in zip(lengths, order.sends, strict=True))
            hop = 0.0
        return _worked_out(order, lengths, hop)


class _Order:
    """What runs after what, and how often; hashed as itself, so that outcomes can be kept."""

    def __init__(
        self,
        kind: ScheduleKind,
        pp: int,
        per_rank: int,
        count: int,
        *,
        group: int | None,
        apart: bool,
    ) -> None:
        plan = build_schedule_graph(
            build_schedule(kind, pp, count, virtual_stages=per_rank, group=group)
        )
        if apart:
            plan = split_last_backward(plan)
        self.ranks, self.messages, self.groups = pp, len(plan.transfers), _one(plan.groups)
        self.rows = [(row[0], row[1], *row[3:]) for row in plan.rows]
        """Rank, group, two messages waited for, two sent."""
        often = Counter((row[0], row[1]) for row in plan.rows)
        self.counts = [(rank, group, number) for (rank, group), number in often.items()]
        """Rank, group, how often the one runs the other."""
        sends = {row[1]: sum(key != NOWHERE for key in row[5:]) for row in plan.rows}
        self.sends = tuple(sends.get(group, 0) for group in range(len(plan.groups)))
        """Messages a group sends."""
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        for index, row in enumerate(plan.rows):
            for op, chunk in plan.groups[row[1]]:
                first.setdefault((row[0], chunk), index)
                if op in _COMPLETING:
                    last[row[0], chunk] = index
        self.edges = [
            [(chunk, first[rank, chunk], last[rank, chunk]) for rank, chunk in first if rank == own]
            for own in range(pp)
        ]
        """For every rank its chunks, with the rows of the first and the last pass."""


_COMPLETING = frozenset({"B", LAST_BACKWARD["B"], "W"})
"""Passes that add the last to a chunk's gradients."""

_order = lru_cache(maxsize=256)(_Order)


@lru_cache(maxsize=256)
def _one(groups: tuple[PassGroup, ...]) -> tuple[PassGroup, ...]:
    """Return the same object for equal groups, so that they need not be compared again."""
    return groups


@lru_cache(maxsize=8192)
def _worked_out(
    order: _Order, lengths: tuple[float, ...], hop: float
) -> tuple[float, tuple[tuple[ChunkEdgeTimes, ...], ...]]:
    """Return when all passes are done, and when each rank begins and ends with its chunks.

    It is `schedule_graph.run_schedule` without records and with one thing less: transfers of
    different passes do not queue.
    """
    free = [0.0] * order.ranks
    comes = [0.0] * (order.messages + 2)
    ends = []
    for rank, group, need, other_need, give, other_give in order.rows:
        start = free[rank]
        there = comes[need]
        if there > start:  # noqa: PLR1730  (max() would double the time of the loop)
            start = there
        if other_need:
            start = max(start, comes[other_need])
        free[rank] = end = start + lengths[group]
        ends.append(end)
        comes[give] = end + hop
        if other_give != NOWHERE:
            comes[other_give] = end + 2 * hop  # behind the first on the same lane
    end = max(free)
    edges = tuple(
        tuple(
            ChunkEdgeTimes(
                chunk,
                ends[first] - lengths[order.rows[first][1]],
                ends[first],
                ends[last] - lengths[order.rows[last][1]] - end,
                ends[last] - end,
            )
            for chunk, first, last in some
        )
        for some in order.edges
    )
    return end, edges
