"""Every layout of a question, one by one: whether it fits, and how long its step takes if it does.

Nothing is left out and nothing bounded: this is what a search without proofs has to go through, and
what a proved one can be held against. Layouts come in an order that shares work. Memory is decided
for all that differ in places and overlap only, and a pipeline is worked out once for all that share
states differently, many pipelines at a time (`flows`). What makes passes wait (ZeRO 2 and 3,
offload) and what lets ranks end apart is predicted layout by layout.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan.planner import pause_gc
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.layer_shapes import Layers
from meshwright.predict.plan.space.recompute_options import RecomputeChoice
from meshwright.predict.plan.space.sharding_cost import ShardingCost
from meshwright.predict.plan.space.sharding_options import StateSharding
from meshwright.predict.plan.space.stage_contents import StageContents
from meshwright.predict.step.grad_buckets import (
    RankChunk,
    grad_reduce_end_s,
    list_chunk_parameters,
    param_gather_delay_s,
)
from meshwright.predict.step.pipeline_bubble import (
    NO_BARRIER_SCHEDULES,
    ChunkEdgeTimes,
    PipelineBubble,
    first_start_s,
    last_end_s,
)
from meshwright.predict.step.recompute_time import recompute_s
from meshwright.predict.step.stage_time import ChunkTime, chunk_times
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.predict.validation.plans.batched_bubble import BubbleInput, predict_bubbles
from meshwright.predict.validation.plans.exhaustive_layouts import (
    LayoutBody,
    LayoutGroup,
    LayoutGroups,
)
from meshwright.spec.layout import Layout


class DPWaits:
    """The data-parallel lanes of a pipeline, one for every rank."""

    def __init__(
        self, pipe: PipelineBubble, sizes: tuple[int, ...], split: tuple[int, ...]
    ) -> None:
        self._edges, self._sizes, self._split = pipe.chunk_edges, sizes, split
        self._begun = [first_start_s(edges) for edges in pipe.chunk_edges]
        self._done = [last_end_s(edges) for edges in pipe.chunk_edges]

    def param_gather_wait_s(self, run: TrainingRun, gathers: Sequence[float]) -> float:
        """Return how much later passes start than they could; `gathers` is that of every rank."""
        most = 0.0
        for rank, (gather_s, begun) in enumerate(zip(gathers, self._begun, strict=True)):
            if gather_s - begun > most:  # who would idle anyway waits for nothing
                edges = self._edges[rank]
                held = [
                    RankChunk(*own, edge.first_forward_start_s, edge.first_forward_end_s)
                    for own, edge in zip(self._held(edges), edges, strict=True)
                ]
                starts = param_gather_delay_s(run, gather_s, held)
                late = [
                    start - edge.first_forward_start_s
                    for start, edge in zip(starts, edges, strict=True)
                ]
                most = max(most, *late)
        return most

    def grad_reduce_wait_s(self, run: TrainingRun, reduces: Sequence[float]) -> float:
        """Return how long gradients are reduced after all passes; `reduces` is of every rank."""
        most = 0.0
        for rank, (reduce_s, done) in enumerate(zip(reduces, self._done, strict=True)):
            if reduce_s + done > most:
                edges = self._edges[rank]
                held = [
                    RankChunk(*own, edge.last_backward_start_s, edge.last_backward_end_s)
                    for own, edge in zip(self._held(edges), edges, strict=True)
                ]
                held.sort(key=lambda one: one.end_s)
                most = max(most, grad_reduce_end_s(run, reduce_s, held))
        return most

    def _held(self, edges: tuple[ChunkEdgeTimes, ...]) -> list[tuple[float, int]]:
        """Return each chunk's share of a rank's parameters, and its layers."""
        whole = sum([self._sizes[edge.chunk] for edge in edges])
        return [(self._sizes[edge.chunk] / whole, self._split[edge.chunk]) for edge in edges]


_TOGETHER = 4096
"""Pipelines that are worked out at a time."""

_NEVER = float("inf")


class ScoredLayout(NamedTuple):
    """A layout with its step."""

    layout_body: LayoutBody
    sharding: StateSharding
    overlap_pp: bool
    offload_layers: int | None
    step_s: float
    """Without end where it does not fit."""

    @property
    def fits(self) -> bool:
        """Whether it fits in memory."""
        return self.step_s != _NEVER

    @property
    def layout(self) -> Layout:
        """The layout."""
        body = self.sharding.apply_to(self.layout_body.to_layout())
        return replace(body, overlap_pp=self.overlap_pp, offload_layers=self.offload_layers)


class ExhaustiveResult(NamedTuple):
    """What trying every layout comes to."""

    tried: int
    """Layouts whose memory was decided."""
    feasible: int
    """Those that fit, with a step predicted for each."""
    best: ScoredLayout | None
    """The fastest."""
    pipelines: int
    """Different pipelines that were worked out for them."""


def search_exhaustively(question: PlanQuestion) -> ExhaustiveResult:
    """Score every layout of a question, and return how many there are and the fastest."""
    tried = fitting = 0
    best, every = None, ExhaustiveSearch(question)
    with pause_gc():
        for one in every:
            tried += 1
            if one.step_s != _NEVER:
                fitting += 1
                if best is None or one.step_s < best.step_s:
                    best = one
    return ExhaustiveResult(tried, fitting, best, every.pipelines)


class _Exchanges(NamedTuple):
    """What a way to share costs the ranks of a pipeline."""

    gathers: list[float]
    reduces: list[float]
    update_s: float


class ExhaustiveSearch:
    """The layouts of one question, each scored when its turn comes."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question, self.space = question, question.space
        self.layout_groups = LayoutGroups(question)
        self.pipelines = 0
        """Pipelines worked out so far, each for several layouts."""
        self._layers: dict[tuple[int, RecomputeChoice], Layers] = {}
        self._exchanges: dict[tuple[ShardingCost, int], _Exchanges] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        # Nothing but its switches decides how much of an exchange a run hides.
        self._switched = {
            on: question.build_run(
                replace(self.space.base, overlap_gradients=on, overlap_parameters=on)
            )
            for on in (False, True)
        }

    def __iter__(self) -> Iterator[ScoredLayout]:
        """Yield every layout."""
        waiting: list[LayoutGroup] = []
        on_device = () in (self.space.get_allowed("offload") or ())
        # Pipelines of one length are worked out side by side.
        for core in sorted(self.layout_groups.degree_splits.list_splits(), key=lambda one: one.pp):
            for job in self.layout_groups.list_groups(core):
                if on_device:
                    yield from self._misfits(job)
                    if job.feasible:
                        waiting.append(job)
                yield from self._offloaded(job)
            if len(waiting) > _TOGETHER:
                yield from self._scored(waiting)
                waiting = []
        yield from self._scored(waiting)

    def _overlaps_sends(self, job: LayoutGroup) -> tuple[bool, ...]:
        return self.layout_groups.list_switch_values("overlap_pp", job.shape.layout.pp > 1)

    def _misfits(self, job: LayoutGroup) -> Iterator[ScoredLayout]:
        for overlap in self._overlaps_sends(job) if job.infeasible else ():
            for shares in job.infeasible:
                for sharing in shares.shardings:
                    yield ScoredLayout(job.body, sharing, overlap, None, _NEVER)

    def _scored(self, jobs: list[LayoutGroup]) -> Iterator[ScoredLayout]:
        """Yield the layouts of some jobs that fit."""
        flows, whose = list[BubbleInput](), list[tuple[LayoutGroup, bool]]()
        for job in jobs:
            apart = (
                job.body.schedule_option.schedule in NO_BARRIER_SCHEDULES
                and job.shape.layout.pp > 1
            )
            layout, times = job.body.to_layout(), None
            for overlap in self._overlaps_sends(job):
                if not apart and any(one.zero < 2 for one in job.feasible):
                    run = self.question.build_run(replace(layout, overlap_pp=overlap))
                    times = times or self._times(run, job)
                    flows.append(BubbleInput(run, times))
                    whose.append((job, overlap))
                for one in job.feasible:
                    if apart or one.zero > 1:
                        yield from self._one_by_one(job, one.shardings, overlap, None)
        self.pipelines += len(flows)
        for flow, (job, overlap), pipe in zip(flows, whose, predict_bubbles(flows), strict=True):
            yield from self._around(job, flow, overlap, pipe)

    def _times(self, run: TrainingRun, job: LayoutGroup) -> tuple[ChunkTime, ...]:
        """Return what every chunk takes."""
        again, layers = job.body.recompute, job.shape.layers
        key = (id(layers), again)
        known = self._layers.get(key)
        if known is None:
            blocks = {block.name: block for block in run.model.blocks}
            known = self._layers[key] = {
                name: layer._replace(
                    recompute_s=recompute_s(run, blocks[name], layer.passes, layer.comm)
                )
                for name, layer in layers.items()
            }
        return chunk_times(run, known)

    def _around(
        self, job: LayoutGroup, flow: BubbleInput, overlap: bool, pipe: PipelineBubble
    ) -> Iterator[ScoredLayout]:
        """Yield the layouts that have a pipeline in common: passes, exchange, update."""
        run, stages = flow.run, job.stage_contents
        passes_s = _passes_s(flow, stages, pipe)
        sizes = self._chunks.get(id(stages))
        if sizes is None:
            sizes = self._chunks[id(stages)] = list_chunk_parameters(run)
        lanes = DPWaits(pipe, sizes, job.body.schedule_option.chunk_layers)
        before, after = (
            dict[tuple[ShardingCost, bool], float](),
            dict[tuple[ShardingCost, bool], float](),
        )
        for _, _, way, sharings in (one for one in job.feasible if one.zero < 2):
            costs = self._exchange(way, stages)
            for sharing in sharings:
                first, last = (way, sharing.overlap_parameters), (way, sharing.overlap_gradients)
                if first not in before:
                    before[first] = lanes.param_gather_wait_s(
                        self._switched[first[1]], costs.gathers
                    )
                if last not in after:
                    after[last] = lanes.grad_reduce_wait_s(self._switched[last[1]], costs.reduces)
                step_s = passes_s + before[first] + after[last] + costs.update_s
                yield ScoredLayout(job.body, sharing, overlap, None, step_s)

    def _exchange(self, way: ShardingCost, stages: StageContents) -> _Exchanges:
        known = self._exchanges.get((way, id(stages)))
        if known is None:
            each = [way.predict_dp_comm(trained) for _, trained in stages.ranks]
            known = self._exchanges[way, id(stages)] = _Exchanges(
                [one.gather_s for one in each],
                [one.reduce_s for one in each],
                max(way.optimizer_step_s(trained) for _, trained in stages.ranks),
            )
        return known

    def _one_by_one(
        self, job: LayoutGroup, sharings: tuple[StateSharding, ...], overlap: bool, away: int | None
    ) -> Iterator[ScoredLayout]:
        """Yield layouts predicted as any single one is."""
        for sharing in sharings:
            one = ScoredLayout(job.body, sharing, overlap, away, _NEVER)
            run = self.question.build_run(one.layout)
            fits = not sharing.offload or predict_memory(run).fits
            yield one._replace(step_s=predict_step(run).step_s) if fits else one

    def _offloaded(self, job: LayoutGroup) -> Iterator[ScoredLayout]:
        """Yield the layouts of a job that keep something in host memory."""
        for kept in self.space.get_allowed("offload") or ():
            if not kept:
                continue
            layers: Iterable[int | None] = (None,)
            if "activations" in kept:
                layers = self.layout_groups.list_layer_counts(
                    "offload_layers", job.stage_contents.max_chunk_layers, whole=True
                )
            sharings = tuple(
                sharing._replace(offload=kept)
                for one in (*job.feasible, *job.infeasible)
                for sharing in one.shardings
            )
            for away, overlap in product(layers, self._overlaps_sends(job)):
                yield from self._one_by_one(job, sharings, overlap, away)


def _passes_s(flow: BubbleInput, stages: StageContents, pipe: PipelineBubble) -> float:
    """Return all passes with the bubble and the transfers, as `predict_step` adds them up."""
    run, own = flow.run, [flow.times[chunk].total for chunk in stages.chunks[pipe.busiest_rank]]
    count = float(run.num_microbatches)
    if run.layout.schedule == "dualpipe" and run.layout.pp > 1:
        count /= 2  # each of its two chunks sees half of the microbatches
    alone = count * sum([one.total_s for one in own])
    hidden = min(max(0.0, alone - pipe.busy_s), count * sum([one.ep_s for one in own]))
    return max(pipe.end_s, alone - hidden + pipe.transfers_s)
