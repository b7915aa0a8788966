"""Every body of a question's layouts with its ways to share, told apart by whether they fit.

A body is all of a layout but how replicas share states. Memory depends neither on where groups lie
nor on what overlaps, so it is decided once for all bodies that differ in nothing else, for every
set of recomputed operations and every number of layers at once (`room`).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.memory.rank_memory import layer_bytes
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.axis_orders import find_group_placements, list_allowed_orders
from meshwright.predict.plan.space.degree_splits import DegreeSplit, DegreeSplits, list_divisors
from meshwright.predict.plan.space.layer_shapes import Layers, LayerShape, LayerShapes
from meshwright.predict.plan.space.memory_fit import ActivationNeeds, LayerSizes, count_needs
from meshwright.predict.plan.space.pipeline_schedules import ScheduleOption, ScheduleOptions
from meshwright.predict.plan.space.recompute_options import RecomputeChoice, list_recompute_choices
from meshwright.predict.plan.space.sharding_cost import ShardingCost, ShardingCosts
from meshwright.predict.plan.space.sharding_options import StateSharding
from meshwright.predict.plan.space.stage_contents import StageContents, StageContentsCache
from meshwright.predict.step.pipeline_bubble import mean_transfer_s
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_mesh_shape

Key = tuple[object, ...]


class LayoutBody(NamedTuple):
    """All of a layout but how replicas share states and what is sent beside compute."""

    base: Layout
    schedule_option: ScheduleOption
    recompute: RecomputeChoice
    recompute_layers: int | None
    """Layers of a chunk that compute again; None for all."""

    def to_layout(self) -> Layout:
        """Return it as a layout, all else as it comes."""
        return self.recompute.apply_to(
            self.schedule_option.apply_to(self.base), self.recompute_layers
        )


class ShardingVariants(NamedTuple):
    """One way to share, with everything that may overlap in it."""

    zero: int
    shard: int | None
    sharding_cost: ShardingCost
    shardings: tuple[StateSharding, ...]


class LayoutGroup(NamedTuple):
    """A body with the ways to share that fit beside it, and those that do not."""

    body: LayoutBody
    shape: LayerShape
    stage_contents: StageContents
    feasible: list[ShardingVariants]
    infeasible: list[ShardingVariants]


class LayoutGroups:
    """The bodies of one question."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question, self.space = question, question.space
        self.degree_splits = DegreeSplits(question)
        self.shapes = LayerShapes(question, self.degree_splits)
        self.schedule_options = ScheduleOptions(self.degree_splits, self.shapes.kernel_times)
        self.stage_contents, self.sharding_costs = (
            StageContentsCache(question),
            ShardingCosts(question),
        )
        self._agains = list_recompute_choices(question)
        self._sizes: dict[Key, LayerSizes] = {}
        self._shares: dict[Key, list[ShardingVariants]] = {}

    def list_switch_values(self, name: str, applies: bool) -> tuple[Any, ...]:
        """Return the values of a switch, its usual one where it has no effect."""
        return (
            (self.space.get_allowed(name) or ()) if applies else (getattr(self.space.base, name),)
        )

    def list_groups(self, core: DegreeSplit) -> Iterator[LayoutGroup]:
        """Yield every body with the degrees of a core."""
        for spread, (split, kind) in product(
            self.degree_splits.list_expert_splits(core),
            self.degree_splits.list_context_options(core.tp, core.cp),
        ):
            plain = self.shapes.build_layout(core, spread)
            plain = replace(plain, sequence_parallel=split, cp_kind=kind)
            shapes = [(shape, self._shared(shape)) for shape in self._shapes(plain)]
            ways = {(one.zero, one.shard): one.sharding_cost for _, some in shapes for one in some}
            for pipe in (
                self.schedule_options.list_options(core, self.question.build_run(plain))
                if shapes
                else ()
            ):
                stages = self.stage_contents.get(shapes[0][0], pipe)
                fits = self._fits(plain, stages, ways)
                for row, again in enumerate(self._agains):
                    for covered in self._covered(again, stages.max_chunk_layers):
                        column = stages.max_chunk_layers if covered is None else covered
                        column = column if again.recompute != "none" else 0
                        for shape, shares in shapes:
                            job = LayoutGroup(
                                LayoutBody(shape.layout, pipe, again, covered),
                                shape,
                                stages,
                                [],
                                [],
                            )
                            for one in shares:
                                fit = fits[one.zero, one.shard][row][column]
                                (job.feasible if fit else job.infeasible).append(one)
                            yield job

    def _shapes(self, plain: Layout) -> Iterator[LayerShape]:
        """Yield the shapes with some degrees; orders that come to the same are of one shape."""
        kernels, orders = self.shapes.kernel_times, list_allowed_orders(self.question, plain)
        for tensor, experts in product(
            self.list_switch_values("overlap_tp", plain.sequence_parallel),
            self.list_switch_values("overlap_ep", plain.ep > 1),
        ):
            alike: dict[tuple[int, float], tuple[TrainingRun, Layers, list[str]]] = {}
            for order in orders:
                layout = replace(plain, order=order, overlap_tp=tensor, overlap_ep=experts)
                run = self.question.build_run(layout)
                inside = kernels.intern_placements(find_group_placements(self.question, run.layout))
                layers, hop = kernels.get_layer_times(run, inside), mean_transfer_s(run)
                alike.setdefault((id(layers), hop), (run, layers, []))[2].append(order)
            for (_, hop), (run, layers, some) in alike.items():
                yield LayerShape(run, tuple(some), layers, kernels.get_end_layers(run), hop)

    def _covered(self, again: RecomputeChoice, deepest: int) -> list[int | None]:
        """Return on how many layers of each chunk a set of operations may be computed again."""
        if again.recompute == "none":
            return [None]
        # Heads that look ahead have layers of their own: all of a chunk are not all there are.
        whole = self.question.model.multi_token is None
        return self.list_layer_counts("recompute_layers", deepest, whole=whole)

    def list_layer_counts(self, name: str, deepest: int, *, whole: bool) -> list[int | None]:
        """Return the numbers of layers per chunk that a field may have; None is all of them."""
        given = self.space.get_allowed(name)
        if given is None:
            return [*range(1, deepest), None if whole else deepest]
        different = {deepest if one is None else one: one for one in given}
        return [one for number, one in different.items() if number <= deepest]

    def _shared(self, shape: LayerShape) -> list[ShardingVariants]:
        """Return the ways to share states, in every order of a shape."""
        layout = shape.layout
        sizes = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp)
        key = (*sizes, layout.precision, shape.orders)
        known = self._shares.get(key)
        if known is None:
            known = self._shares[key] = [
                self._share(replace(layout, order=order), zero, shard)
                for order in shape.orders
                for zero in self.space.get_allowed("zero") or ()
                if not zero or layout.dp * layout.cp > 1
                for shard in self._shards(layout, order, zero)
            ]
        return known

    def _share(self, layout: Layout, zero: int, shard: int | None) -> ShardingVariants:
        spread = layout.dp * layout.cp > 1
        flags = product(
            self.list_switch_values("overlap_gradients", spread),
            self.list_switch_values("overlap_parameters", spread and zero > 0),
        )
        way = self.sharding_costs.get(layout, zero, shard, (), layout.order)
        sharings = tuple(StateSharding(zero, shard, layout.order, *both, ()) for both in flags)
        return ShardingVariants(zero, shard, way, sharings)

    def _shards(self, layout: Layout, order: str, zero: int) -> Iterator[int | None]:
        """Yield the sizes of a group that shares one copy of the states."""
        allowed = self.space.get_allowed("shard")
        if not zero:
            yield None
            return
        for shard in (None, *list_divisors(layout.dp * layout.cp)[1:-1]):
            if allowed is not None and shard not in allowed:
                continue
            try:
                get_mesh_shape(replace(layout, order=order, shard=shard))
            except InputError:
                continue  # no mesh has such groups
            yield shard

    def _fits(
        self, plain: Layout, stages: StageContents, ways: dict[tuple[int, int | None], ShardingCost]
    ) -> dict[tuple[int, int | None], list[list[bool]]]:
        """Tell of every way to share what fits: by set of operations and layers they cover."""
        found, needs = {}, dict[bool, tuple[ActivationNeeds, ...]]()
        for (zero, shard), way in ways.items():
            sharded = zero == 3
            if sharded not in needs:
                run = self.question.build_run(replace(plain, zero=3) if sharded else plain)
                needs[sharded] = count_needs(run, self._of_layers(run), stages)
            every = [
                need.fits_with(way.count_resident_bytes(holding.stage_rank, plain.microbatch))
                for need, holding in zip(needs[sharded], stages.rank_contents, strict=True)
            ]
            found[zero, shard] = np.logical_and.reduce(every).tolist()
        return found

    def _of_layers(self, run: TrainingRun) -> LayerSizes:
        """Return what layers keep under every set of operations."""
        layout = run.layout
        key = (
            layout.tp, layout.cp, layout.cp_kind, layout.sequence_parallel, layout.ep,
            layout.expert_tp, layout.precision, layout.zero == 3,
        )  # fmt: skip
        known = self._sizes.get(key)
        if known is None:
            every = [
                layer_bytes(self.question.build_run(again.apply_to(layout)))
                for again in self._agains
            ]
            known = self._sizes[key] = LayerSizes(every)
        return known
