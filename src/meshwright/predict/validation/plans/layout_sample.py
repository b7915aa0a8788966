"""Layouts drawn at random from a question's space, so that any layout's rank can be estimated.

A draw makes one choice after the other, each uniformly among what the choices before it allow: the
split of the GPUs (tp, cp, pp, dp), microbatch, precision, places of experts, order of the axes,
sequence parallelism, kind of context parallelism, schedule, chunks, split of the layers, kind of
recompute, its operations and layers, ZeRO stage, shard, what is offloaded, switches. A switch is
drawn only where it has an effect. What is unsound or does not fit is thrown away, and whoever comes
after takes its place.

Uniform over whole layouts would be another measure: most layouts recompute some odd set of
operations on some odd number of layers, and all that varies only what hardly matters would drown
what does. Drawn choice by choice, every split counts the same and a third of the draws recompute
nothing, so there are more fast layouts among them and a rank is harder to earn.
"""

import random
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import PlanCandidate
from meshwright.predict.plan.space.axis_orders import list_allowed_orders
from meshwright.predict.plan.space.degree_splits import DegreeSplit, DegreeSplits, list_divisors
from meshwright.predict.plan.space.layer_shapes import LayerShapes
from meshwright.predict.plan.space.pipeline_schedules import ScheduleOptions
from meshwright.predict.plan.space.recompute_options import list_recompute_choices
from meshwright.predict.step.step_prediction import predict_step
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_mesh_shape

T = TypeVar("T")

_Z_95 = 1.959964
"""Standard deviations on each side that hold 95 % of a normal distribution."""


class RankEstimate(NamedTuple):
    """Which share of feasible layouts is faster than some layout, with its 95 % interval."""

    share: float
    low: float
    high: float
    draws: int
    """Feasible layouts it was compared with."""


def wilson_interval(hits: int, draws: int) -> RankEstimate:
    """Return a share estimated from draws with Wilson's interval, which holds near 0 and 1, too.

    E. B. Wilson, Journal of the American Statistical Association 22 (1927), p. 209.
    """
    if not draws:
        return RankEstimate(0.0, 0.0, 1.0, 0)
    share, extra = hits / draws, _Z_95**2 / draws
    middle = (share + extra / 2) / (1 + extra)
    reach = (share * (1 - share) * extra + extra**2 / 4) ** 0.5 / (1 + extra)
    return RankEstimate(share, max(0.0, middle - reach), min(1.0, middle + reach), draws)


class LayoutSample(NamedTuple):
    """Feasible layouts drawn from a space."""

    fastest: tuple[PlanCandidate, ...]
    """The fastest first."""
    tried: int
    """Draws it took, those that do not fit included."""

    def count_faster(self, step_s: float) -> int:
        """Return how many are faster than a step, by more than rounding."""
        return sum(one.step.step_s < step_s * (1 - 1e-9) for one in self.fastest)

    def estimate_rank(self, step_s: float) -> RankEstimate:
        """Return where a layout with such a step stands among all feasible ones."""
        return wilson_interval(self.count_faster(step_s), len(self.fastest))


def sample_layouts(
    question: PlanQuestion, *, feasible: int, tries: int, seed: int = 0
) -> LayoutSample:
    """Draw until so many feasible layouts are found, or so many draws were made."""
    draws, found, tried = LayoutSampler(question, random.Random(seed)), list[PlanCandidate](), 0
    while len(found) < feasible and tried < tries and draws.splits:
        tried += 1
        layout = draws.sample_layout()
        if layout is not None and is_feasible(question, layout):
            found.append(PlanCandidate(layout, predict_step(question.build_run(layout))))
    found.sort(key=lambda one: one.step.step_s)
    return LayoutSample(tuple(found), tried)


def is_feasible(question: PlanQuestion, layout: Layout) -> bool:
    """Tell whether a layout is sound, and predicted to fit."""
    # The check of states alone is coarser than the prediction, which decides about memory.
    problems = question.build_job(layout).check()
    sound = all(problem.where == "memory" for problem in problems)
    return sound and predict_memory(question.build_run(layout)).fits


class LayoutSampler:
    """Draws layouts of one question."""

    def __init__(self, question: PlanQuestion, rng: random.Random) -> None:
        self.question, self.space, self.rng = question, question.space, rng
        self.meshes = DegreeSplits(question)
        self.shapes = LayerShapes(question, self.meshes)
        self.pipes = ScheduleOptions(self.meshes, self.shapes.kernel_times)

    @cached_property
    def splits(self) -> dict[tuple[int, ...], list[DegreeSplit]]:
        """Every split of the GPUs, each with its microbatches and precisions."""
        found: dict[tuple[int, ...], list[DegreeSplit]] = {}
        for core in self.meshes.list_splits():
            found.setdefault((core.tp, core.cp, core.pp, core.dp), []).append(core)
        return found

    @cached_property
    def _agains(self) -> dict[str, list[tuple[Any, ...]]]:
        found: dict[str, list[tuple[Any, ...]]] = {}
        for again in list_recompute_choices(self.question):
            found.setdefault(again.recompute, []).append(again.ops)
        return found

    def sample_layout(self) -> Layout | None:
        """Draw a layout; None where the choices made first leave none."""
        try:
            core = self.choose(self.splits[self.choose(list(self.splits))])
            layout = self.shapes.build_layout(
                core, self.choose(self.meshes.list_expert_splits(core))
            )
            layout = replace(layout, order=self.choose(list_allowed_orders(self.question, layout)))
            split, kind = self.choose(self.meshes.list_context_options(core.tp, core.cp))
            layout = replace(layout, sequence_parallel=split, cp_kind=kind)
            layout, deepest = self._with_schedule(core, layout)
            layout = self._with_recompute(layout, deepest)
            return self._with_switches(self._with_offload(self._with_sharing(layout), deepest))
        except (_NoChoice, InputError):
            return None  # such as a shard that a mesh cannot have

    def choose(self, some: Sequence[T]) -> T:
        """Return one of some, all as likely."""
        if not some:
            raise _NoChoice
        return some[self.rng.randrange(len(some))]

    def _with_schedule(self, core: DegreeSplit, layout: Layout) -> tuple[Layout, int]:
        """Draw a schedule, its chunks and their layers; return the layers of the longest, too."""
        chunks: dict[Any, list[int]] = {}
        for schedule, count in self.meshes.list_schedules(core):
            chunks.setdefault(schedule, []).append(count)
        name = self.choose(list(chunks))
        count = self.choose(chunks[name])
        split = self.choose(
            self.pipes.list_layer_splits(self.question.build_run(layout), core.pp * count)
        )
        even = None if len(set(split)) == 1 else split
        layout = replace(layout, schedule=name, virtual_stages=count, stage_layers=even)
        return layout, max(split)

    def _with_recompute(self, layout: Layout, deepest: int) -> Layout:
        kind: Any = self.choose(list(self._agains))
        ops = self.choose(self._agains[kind])
        layers = None if kind == "none" else self._layers("recompute_layers", deepest)
        return replace(layout, recompute=kind, recompute_ops=ops, recompute_layers=layers)

    def _with_sharing(self, layout: Layout) -> Layout:
        spread = layout.dp * layout.cp
        zero = self.choose((self.space.get_allowed("zero") or ()) if spread > 1 else (0,))
        return replace(layout, zero=zero, shard=self.choose(self._shards(layout)) if zero else None)

    def _shards(self, layout: Layout) -> list[int | None]:
        found: list[int | None] = [None]
        for shard in list_divisors(layout.dp * layout.cp)[1:-1]:
            try:
                get_mesh_shape(replace(layout, shard=shard))
            except InputError:
                continue  # no mesh has such groups
            found.append(shard)
        allowed = self.space.get_allowed("shard")
        return [shard for shard in found if allowed is None or shard in allowed]

    def _with_offload(self, layout: Layout, deepest: int) -> Layout:
        """Draw whether anything goes to the host, and only then what."""
        every = self.space.get_allowed("offload") or ()
        some = [kept for kept in every if kept]
        kept = self.choose(some if some and self._switch(every) else [()])
        layers = self._layers("offload_layers", deepest) if "activations" in kept else None
        return replace(layout, offload=kept, offload_layers=layers)

    def _switch(self, values: Iterable[Any]) -> bool:
        """Draw whether something is on, where it may be both."""
        return bool(self.choose(sorted({bool(value) for value in values})))

    def _layers(self, name: str, deepest: int) -> int | None:
        """Draw a number of layers per chunk; None for all of them."""
        given = self.space.get_allowed(name)
        layers = self.choose(range(1, deepest + 1) if given is None else given)
        return None if layers == deepest else layers

    def _with_switches(self, layout: Layout) -> Layout:
        shared = layout.dp * layout.cp > 1
        applies = {
            "overlap_gradients": shared,
            "overlap_parameters": shared and layout.zero > 0,
            "overlap_tp": layout.sequence_parallel,
            "overlap_pp": layout.pp > 1,
            "overlap_ep": layout.ep > 1,
        }
        drawn: dict[str, Any] = {
            name: self._switch(self.space.get_allowed(name) or ())
            for name, matters in applies.items()
            if matters
        }
        return replace(layout, **drawn)


class _NoChoice(Exception):
    """The choices made so far leave nothing to choose from."""
