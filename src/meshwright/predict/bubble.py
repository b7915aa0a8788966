"""How long a pipeline idles and waits for transfers, fast enough for a search.

A schedule settles into a steady pace after some microbatches for every rank. So it is worked out
pass by pass for a few microbatches per rank, and what is left of the step runs at the pace of the
last of them. That holds for every schedule and for stages of any length; the event simulation,
which runs every microbatch, says how well.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from meshwright.policy.pipeline import build
from meshwright.policy.pipeline.interleaved import default_group
from meshwright.predict.block_comm import neighbours
from meshwright.predict.network import collective_s
from meshwright.predict.pass_time import LAST, Passes, Waits, lengths_s
from meshwright.predict.run import Run
from meshwright.predict.simulate_plan import NOWHERE, lasts_apart, plan_of
from meshwright.predict.stage_time import ChunkTime, StageTime, sent_bytes
from meshwright.spec.layout import ScheduleKind, rank_chunks

_ROUNDS = {"zb-h2": 4}
"""Microbatches per rank that are worked out: three, more where the warm-up is twice as long."""

_SMALL = 0.01
"""Share of a step below which it is not worked out exactly how much of it transfers cost."""

ENDS_APART = frozenset({"zb-h1", "zb-h2", "zb-v"})
"""Schedules whose ranks update without waiting for each other, because the gradient norm is
validated afterwards (Qi et al. 2024, arXiv 2401.10241, section 4)."""


class Edge(NamedTuple):
    """When a rank begins and ends with one of its chunks."""

    chunk: int
    first_s: float
    """When its first forward starts, from the start of all passes."""
    begun_s: float
    """When that ends."""
    last_s: float
    """When the backward starts that completes its gradients, to the end of all passes."""
    done_s: float
    """When that ends; 0 where it is the last of all passes, less where others follow."""


class Pipeline(NamedTuple):
    """What a pipeline adds to the passes of its busiest rank."""

    busiest: int
    """The rank with the most work."""
    busy_s: float
    """How long its passes take: less than one by one, where two hide each other's exchange."""
    end_s: float
    """How long all passes take; where ranks end apart, the longest that one rank takes."""
    transfers_s: float
    """How much of that is due to transfers."""
    edges: tuple[tuple[Edge, ...], ...]
    """The chunks of each rank, in the order they are begun."""


def ends_apart(run: Run) -> bool:
    """Whether ranks update their weights without waiting for all others."""
    layout = run.layout
    return layout.schedule in ENDS_APART and layout.pp > 1 and run.software.ends_apart


def begun_s(edges: tuple[Edge, ...]) -> float:
    """Return when a rank begins, from the start of all passes."""
    return edges[0].first_s


def done_s(edges: tuple[Edge, ...]) -> float:
    """Return when a rank is done, to the end of all passes."""
    return max([edge.done_s for edge in edges])


def hop_s(run: Run) -> float:
    """Return how long that takes, on the mean over all stages."""
    if run.layout.pp == 1:
        return 0.0
    if run.measured is not None:
        return run.measured.message.seconds(sent_bytes(run))
    pairs, size = neighbours(run.cluster, run.layout, "pp"), sent_bytes(run)
    whole = sum(often * collective_s(pair, "send_recv", size) for pair, often in pairs)
    return whole / (run.layout.pp - 1)


def rank_times(run: Run, times: tuple[ChunkTime, ...]) -> tuple[StageTime, ...]:
    """Return what one pass each way over all chunks of a rank costs."""
    if not hold_several(run):
        return tuple(time.whole for time in times)
    held = rank_chunks(run.layout, run.model.layers)
    return tuple(_sum([times[chunk.position].whole for chunk in some]) for some in held)


def hold_several(run: Run) -> bool:
    """Whether ranks hold more than one chunk."""
    layout = run.layout
    return layout.virtual_stages > 1 or (layout.schedule == "dualpipe" and layout.pp > 1)


def _sum(some: list[StageTime]) -> StageTime:
    return some[0] if len(some) == 1 else StageTime(*map(sum, zip(*some, strict=True)))


def per_microbatch(run: Run, stage: StageTime) -> StageTime:
    """Return what a microbatch costs a rank on average.

    DualPipe feeds from both ends: a rank holds two chunks, and each sees half of the microbatches.
    """
    if run.layout.schedule != "dualpipe" or run.layout.pp == 1:
        return stage
    return StageTime(*(part / 2 for part in stage))


def pipeline(run: Run, times: tuple[ChunkTime, ...], waits: tuple[Waits, ...]) -> Pipeline:
    """Return what the layout's schedule adds to the passes of its busiest rank.

    `waits` is, by chunk, what passes wait for beside their own communication.
    """
    layout, count = run.layout, run.microbatches
    if layout.pp == 1:
        late, (forward, backward) = waits[0], times[0].whole[:2]
        forward += late.forward_dp + late.forward_offload
        last = backward + late.last_dp + late.backward_offload
        backward += late.backward_dp + late.backward_offload
        end = count * forward + (count - 1) * backward + last
        return Pipeline(0, end, end, 0.0, ((Edge(0, 0.0, forward, -last, 0.0),),))
    passes = _Passes(run, times, waits)
    end, edges = passes.step()
    busy = passes.busy()
    busiest = max(range(layout.pp), key=busy.__getitem__)
    transfers = 2 * (len(times) - 1) * passes.hop  # one microbatch there and back
    most = transfers + 2 * count * layout.virtual_stages * passes.hop
    if most > _SMALL * end:
        transfers = end - passes.step(instant=True)[0]
    if ends_apart(run):
        end += max(done_s(own) - begun_s(own) for own in edges)
    return Pipeline(busiest, busy[busiest], end, min(transfers, end - busy[busiest]), edges)


def _few(kind: ScheduleKind, pp: int, count: int) -> tuple[int, int]:
    """Return how many microbatches to work out, and of how many the last give the pace.

    What is left out has to fit the schedule's rhythm.
    """
    round_ = default_group(pp, count) if kind == "interleaved" else pp
    rhythm = {"interleaved": round_, "dualpipe": 2}.get(kind, 1)
    most = max((_ROUNDS.get(kind, 3) - 1) * pp, round_) + round_
    return (count if count <= most else most + (count - most) % rhythm), round_


class _Passes:
    """The passes of a run, and what the schedule makes of them for some microbatches."""

    def __init__(self, run: Run, times: tuple[ChunkTime, ...], waits: tuple[Waits, ...]) -> None:
        self._run, self._times, self._waits = run, times, waits
        self._apart = run.layout.zero == 2 and any(one.last_dp != one.backward_dp for one in waits)
        self.hop = hop_s(run)
        self._few, self._round = _few(run.layout.schedule, run.layout.pp, run.microbatches)
        self._left = run.microbatches - self._few
        self._lengths: dict[int, tuple[float, ...]] = {}

    def _order(self, microbatches: int) -> "_Order":
        layout, group = self._run.layout, None
        if layout.schedule == "interleaved":
            group = default_group(layout.pp, self._run.microbatches)
        kind, chunks = layout.schedule, layout.virtual_stages
        return _order(kind, layout.pp, chunks, microbatches, group=group, apart=self._apart)

    def _lengths_s(self, order: "_Order") -> tuple[float, ...]:
        known = self._lengths.get(id(order.groups))
        if known is None:
            known = lengths_s(self._run, self._times, self._waits, order.groups)
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

    def step(self, *, instant: bool = False) -> tuple[float, tuple[tuple[Edge, ...], ...]]:
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

    def _done(self, microbatches: int, instant: bool) -> tuple[float, tuple[tuple[Edge, ...], ...]]:
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
        plan = plan_of(build(kind, pp, count, virtual_stages=per_rank, group=group))
        if apart:
            plan = lasts_apart(plan)
        self.ranks, self.messages, self.groups = pp, len(plan.messages), _one(plan.groups)
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


_COMPLETING = frozenset({"B", LAST["B"], "W"})
"""Passes that add the last to a chunk's gradients."""

_order = lru_cache(maxsize=256)(_Order)


@lru_cache(maxsize=256)
def _one(groups: tuple[Passes, ...]) -> tuple[Passes, ...]:
    """Return the same object for equal groups, so that they need not be compared again."""
    return groups


@lru_cache(maxsize=8192)
def _worked_out(
    order: _Order, lengths: tuple[float, ...], hop: float
) -> tuple[float, tuple[tuple[Edge, ...], ...]]:
    """Return when all passes are done, and when each rank begins and ends with its chunks.

    It is `simulate_plan.clock` without records and with one thing less: transfers of different
    passes do not queue.
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
            Edge(
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
