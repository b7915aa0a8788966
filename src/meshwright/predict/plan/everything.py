"""Every layout of a question, one by one: whether it fits, and how long its step takes if it does.

Nothing is left out and nothing bounded: this is what a search without proofs has to go through, and
what a proved one can be held against. Layouts come in an order that shares work. Memory is decided
for all that differ in places and overlap only, and a pipeline is worked out once for all that share
states differently, many pipelines at a time (`flows`). What makes passes wait (ZeRO 2 and 3,
offload) and what lets ranks end apart is predicted layout by layout.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.bubble import ENDS_APART, Pipeline
from meshwright.predict.buckets import chunk_sizes
from meshwright.predict.memory import predict_memory
from meshwright.predict.plan.answer import without_collector
from meshwright.predict.plan.burdens import Way
from meshwright.predict.plan.flows import Flow, pipelines
from meshwright.predict.plan.holdings import Stages
from meshwright.predict.plan.jobs import Body, Job, Jobs
from meshwright.predict.plan.lanes import Lanes
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Again
from meshwright.predict.plan.shapes import Layers
from meshwright.predict.plan.sharing import Sharing
from meshwright.predict.recompute_time import recompute_s
from meshwright.predict.run import Run
from meshwright.predict.stage_time import ChunkTime, chunk_times
from meshwright.predict.step import predict_step
from meshwright.spec.layout import Layout

_TOGETHER = 4096
"""Pipelines that are worked out at a time."""
_NEVER = float("inf")


class Scored(NamedTuple):
    """A layout with its step."""

    body: Body
    sharing: Sharing
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
        body = self.sharing.on(self.body.layout())
        return replace(body, overlap_pp=self.overlap_pp, offload_layers=self.offload_layers)


class Tally(NamedTuple):
    """What trying every layout comes to."""

    tried: int
    """Layouts whose memory was decided."""
    fitting: int
    """Those that fit, with a step predicted for each."""
    best: Scored | None
    """The fastest."""
    pipelines: int
    """Different pipelines that were worked out for them."""


def try_everything(question: Question) -> Tally:
    """Score every layout of a question, and return how many there are and the fastest."""
    tried = fitting = 0
    best, every = None, Everything(question)
    with without_collector():
        for one in every:
            tried += 1
            if one.step_s != _NEVER:
                fitting += 1
                if best is None or one.step_s < best.step_s:
                    best = one
    return Tally(tried, fitting, best, every.pipelines)


class _Exchanges(NamedTuple):
    """What a way to share costs the ranks of a pipeline."""

    gathers: list[float]
    reduces: list[float]
    update_s: float


class Everything:
    """The layouts of one question, each scored when its turn comes."""

    def __init__(self, question: Question) -> None:
        self.question, self.space = question, question.space
        self.jobs = Jobs(question)
        self.pipelines = 0
        """Pipelines worked out so far, each for several layouts."""
        self._layers: dict[tuple[int, Again], Layers] = {}
        self._exchanges: dict[tuple[Way, int], _Exchanges] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        # Nothing but its switches decides how much of an exchange a run hides.
        self._switched = {
            on: question.run(replace(self.space.base, overlap_gradients=on, overlap_parameters=on))
            for on in (False, True)
        }

    def __iter__(self) -> Iterator[Scored]:
        """Yield every layout."""
        waiting: list[Job] = []
        on_device = () in (self.space.allowed("offload") or ())
        # Pipelines of one length are worked out side by side.
        for core in sorted(self.jobs.meshes.cores(), key=lambda one: one.pp):
            for job in self.jobs.of(core):
                if on_device:
                    yield from self._misfits(job)
                    if job.fitting:
                        waiting.append(job)
                yield from self._offloaded(job)
            if len(waiting) > _TOGETHER:
                yield from self._scored(waiting)
                waiting = []
        yield from self._scored(waiting)

    def _overlaps_sends(self, job: Job) -> tuple[bool, ...]:
        return self.jobs.allowed("overlap_pp", job.shape.layout.pp > 1)

    def _misfits(self, job: Job) -> Iterator[Scored]:
        for overlap in self._overlaps_sends(job) if job.other else ():
            for shares in job.other:
                for sharing in shares.sharings:
                    yield Scored(job.body, sharing, overlap, None, _NEVER)

    def _scored(self, jobs: list[Job]) -> Iterator[Scored]:
        """Yield the layouts of some jobs that fit."""
        flows, whose = list[Flow](), list[tuple[Job, bool]]()
        for job in jobs:
            apart = job.body.pipe.schedule in ENDS_APART and job.shape.layout.pp > 1
            layout, times = job.body.layout(), None
            for overlap in self._overlaps_sends(job):
                if not apart and any(one.zero < 2 for one in job.fitting):
                    run = self.question.run(replace(layout, overlap_pp=overlap))
                    times = times or self._times(run, job)
                    flows.append(Flow(run, times))
                    whose.append((job, overlap))
                for one in job.fitting:
                    if apart or one.zero > 1:
                        yield from self._one_by_one(job, one.sharings, overlap, None)
        self.pipelines += len(flows)
        for flow, (job, overlap), pipe in zip(flows, whose, pipelines(flows), strict=True):
            yield from self._around(job, flow, overlap, pipe)

    def _times(self, run: Run, job: Job) -> tuple[ChunkTime, ...]:
        """Return what every chunk takes."""
        again, layers = job.body.again, job.shape.layers
        key = (id(layers), again)
        known = self._layers.get(key)
        if known is None:
            blocks = {block.name: block for block in run.model.blocks}
            known = self._layers[key] = {
                name: layer._replace(
                    recompute=recompute_s(run, blocks[name], layer.passes, layer.comm)
                )
                for name, layer in layers.items()
            }
        return chunk_times(run, known)

    def _around(self, job: Job, flow: Flow, overlap: bool, pipe: Pipeline) -> Iterator[Scored]:
        """Yield the layouts that have a pipeline in common: passes, exchange, update."""
        run, stages = flow.run, job.stages
        passes_s = _passes_s(flow, stages, pipe)
        sizes = self._chunks.get(id(stages))
        if sizes is None:
            sizes = self._chunks[id(stages)] = chunk_sizes(run)
        lanes = Lanes(pipe, sizes, job.body.pipe.split)
        before, after = dict[tuple[Way, bool], float](), dict[tuple[Way, bool], float]()
        for _, _, way, sharings in (one for one in job.fitting if one.zero < 2):
            costs = self._exchange(way, stages)
            for sharing in sharings:
                first, last = (way, sharing.overlap_parameters), (way, sharing.overlap_gradients)
                if first not in before:
                    before[first] = lanes.before_s(self._switched[first[1]], costs.gathers)
                if last not in after:
                    after[last] = lanes.after_s(self._switched[last[1]], costs.reduces)
                step_s = passes_s + before[first] + after[last] + costs.update_s
                yield Scored(job.body, sharing, overlap, None, step_s)

    def _exchange(self, way: Way, stages: Stages) -> _Exchanges:
        known = self._exchanges.get((way, id(stages)))
        if known is None:
            each = [way.exchange(trained) for _, trained in stages.ranks]
            known = self._exchanges[way, id(stages)] = _Exchanges(
                [one.gather_s for one in each],
                [one.reduce_s for one in each],
                max(way.update_s(trained) for _, trained in stages.ranks),
            )
        return known

    def _one_by_one(
        self, job: Job, sharings: tuple[Sharing, ...], overlap: bool, away: int | None
    ) -> Iterator[Scored]:
        """Yield layouts predicted as any single one is."""
        for sharing in sharings:
            one = Scored(job.body, sharing, overlap, away, _NEVER)
            run = self.question.run(one.layout)
            fits = not sharing.offload or predict_memory(run).fits
            yield one._replace(step_s=predict_step(run).step_s) if fits else one

    def _offloaded(self, job: Job) -> Iterator[Scored]:
        """Yield the layouts of a job that keep something in host memory."""
        for kept in self.space.allowed("offload") or ():
            if not kept:
                continue
            layers: Iterable[int | None] = (None,)
            if "activations" in kept:
                layers = self.jobs.some_layers("offload_layers", job.stages.deepest, whole=True)
            sharings = tuple(
                sharing._replace(offload=kept)
                for one in (*job.fitting, *job.other)
                for sharing in one.sharings
            )
            for away, overlap in product(layers, self._overlaps_sends(job)):
                yield from self._one_by_one(job, sharings, overlap, away)


def _passes_s(flow: Flow, stages: Stages, pipe: Pipeline) -> float:
    """Return all passes with the bubble and the transfers, as `predict_step` adds them up."""
    run, own = flow.run, [flow.times[chunk].whole for chunk in stages.chunks[pipe.busiest]]
    count = float(run.microbatches)
    if run.layout.schedule == "dualpipe" and run.layout.pp > 1:
        count /= 2  # each of its two chunks sees half of the microbatches
    alone = count * sum([one.total for one in own])
    hidden = min(max(0.0, alone - pipe.busy_s), count * sum([one.ep for one in own]))
    return max(pipe.end_s, alone - hidden + pipe.transfers_s)
