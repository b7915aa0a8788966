"""A frame: a split of the GPUs with its microbatch, and the schedules whose memory it allows.

Memory depends on the degrees, the microbatch and the schedule, not on where groups lie, so what has
to be computed again is found once for all shapes of a frame.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.predict.memory.rank_memory import ResidentBytes
from meshwright.predict.plan.bounds.pipeline_bounds import RankBound, bound_ranks
from meshwright.predict.plan.bounds.schedule_bounds import LayerLoads, ScheduleBounds
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.degree_splits import DegreeSplit, ExpertParallelSplit
from meshwright.predict.plan.space.layer_shapes import LayerShape, LayerShapes, find_fastest_shape
from meshwright.predict.plan.space.memory_fit import (
    ActivationNeeds,
    Array,
    count_needs,
    find_fitting_options,
    find_min_recompute_layers,
    first_fitting_layers,
)
from meshwright.predict.plan.space.pipeline_schedules import (
    OVERLAPPED_SCHEDULES,
    ChunkLayerCounts,
    ScheduleOption,
    ScheduleOptions,
    sum_chunk_times,
)
from meshwright.predict.plan.space.recompute_options import (
    EffectiveRecompute,
    RecomputeOption,
    RecomputeOptions,
)
from meshwright.predict.plan.space.sharding_cost import ShardingCosts, grad_scatter_share
from meshwright.predict.plan.space.sharding_options import ShardingOptions
from meshwright.predict.plan.space.stage_contents import StageContents, StageContentsCache
from meshwright.predict.plan.space.zero_groups import ZeroGroup, list_zero_groups
from meshwright.spec.layout import StateBytes

_ROUNDED = 2
"""Bytes that rounding two sizes may add to their difference."""


class DegreeSchedule:
    """A schedule on the ranks of a frame."""

    def __init__(self, frames: "DegreeNodes", shape: LayerShape, pipe: ScheduleOption) -> None:
        self.frames, self.shape, self.run, self.schedule_option = frames, shape, shape.run, pipe
        self._rooms: dict[bool, _Rooms] = {}
        self._least: dict[ZeroGroup, list[int | None]] = {}
        self._away: dict[bool, list[tuple[ActivationNeeds, ...]]] = {}

    @cached_property
    def stage_contents(self) -> StageContents:
        """What its ranks hold."""
        return self.frames.stage_contents.get(self.shape, self.schedule_option)

    def _room(self, sharded: bool) -> "_Rooms":
        known = self._rooms.get(sharded)
        if known is None:
            run = self.run
            if sharded:
                run = self.frames.question.build_run(replace(run.layout, zero=3))
            useful = self.frames.recompute_options.find_effective(run)
            known = self._rooms[sharded] = _Rooms(
                useful, count_needs(run, useful.sizes, self.stage_contents)
            )
        return known

    def min_recompute_layers_sharded(self, keeping: ZeroGroup) -> list[int | None]:
        """Return on how few layers every option has to run where states are shared most."""
        known = self._least.get(keeping)
        if known is None:
            known = self._least[keeping] = self.find_min_recompute_layers(
                keeping, self.min_resident_bytes(keeping)
            )
        return known

    def find_min_recompute_layers(
        self, keeping: ZeroGroup, residents: tuple[ResidentBytes, ...]
    ) -> list[int | None]:
        """Return on how few layers every option has to run beside what ranks hold."""
        room = self._room(keeping.shards_parameters)
        if keeping.offloads_activations:
            fits = np.logical_or.reduce(self._moved(keeping, residents))
            return first_fitting_layers(fits, room.useful.none_index)
        return find_min_recompute_layers(room.needs, residents, room.useful.none_index)

    def find_min_offloaded_layers(
        self, keeping: ZeroGroup, residents: tuple[ResidentBytes, ...]
    ) -> list[list[int | None]]:
        """Return for every option and number of layers the fewest whose activations have to go.

        The number of layers of the longest chunk stands for all; None says that none are enough.
        """
        fits = np.array(self._moved(keeping, residents))
        first: list[list[int]] = (fits.argmax(axis=0) + 1).tolist()
        possible: list[list[bool]] = np.logical_or.reduce(fits).tolist()
        return [
            [number if fit else None for number, fit in zip(*row, strict=True)]
            for row in zip(first, possible, strict=True)
        ]

    def moved_bytes(
        self, keeping: ZeroGroup, option: RecomputeOption, layers: int, away: int
    ) -> tuple[float, ...]:
        """Return what one chunk of every rank sends to the host for a microbatch."""
        whole, left = (
            self._room(keeping.shards_parameters).needs,
            self._needs_away(keeping)[away - 1],
        )
        kinds = [
            float(
                a.kept_bytes[option.option_index, layers]
                - b.kept_bytes[option.option_index, layers]
                - _ROUNDED
            )
            / one.in_flight
            for a, b, one in zip(whole, left, self.stage_contents.rank_contents, strict=True)
        ]
        return tuple([max(0.0, kinds[kind]) for kind in self.stage_contents.contents_index])

    def _moved(self, keeping: ZeroGroup, residents: tuple[ResidentBytes, ...]) -> list[Array]:
        """Tell what fits, by on how many layers activations go to the host.

        A row for every option, a column for every number of layers it covers.
        """
        return [find_fitting_options(needs, residents) for needs in self._needs_away(keeping)]

    def _needs_away(self, keeping: ZeroGroup) -> list[tuple[ActivationNeeds, ...]]:
        """Return what activations need, by on how many layers they go to the host."""
        known = self._away.get(keeping.shards_parameters)
        if known is None:
            sizes, deepest = (
                self._room(keeping.shards_parameters).useful.sizes,
                self.stage_contents.max_chunk_layers,
            )
            layout = replace(self.run.layout, offload=("activations",))
            layout = replace(layout, zero=3) if keeping.shards_parameters else layout
            known = self._away[keeping.shards_parameters] = [
                count_needs(self.frames.question.build_run(one), sizes, self.stage_contents)
                for number in range(1, deepest + 1)
                for one in (replace(layout, offload_layers=number if number < deepest else None),)
            ]
        return known

    def min_resident_bytes(self, keeping: ZeroGroup) -> tuple[ResidentBytes, ...]:
        """Return what each kind of rank holds where states are shared most."""
        layout, ways = self.run.layout, self.frames.sharding_costs
        away = keeping.offload
        some = [ways.get(layout, zero, None, away, layout.order) for zero in keeping.zero_stages]
        return tuple(
            [
                _lightest(
                    [way.count_resident_bytes(one.stage_rank, layout.microbatch) for way in some]
                )
                for one in self.stage_contents.rank_contents
            ]
        )


def _lightest(every: list[ResidentBytes]) -> ResidentBytes:
    """Return what holds no more of anything than any of some."""
    if len(every) == 1:
        return every[0]
    return ResidentBytes(
        StateBytes(*map(min, zip(*(one.states for one in every), strict=True))),
        min(one.logits_bytes for one in every),
        min(one.buffers_bytes for one in every),
        min(one.update_bytes for one in every),
        min(one.runtime_bytes for one in every),
        any(one.gradients_replace_activations for one in every),
    )


class _Rooms(NamedTuple):
    """What activations need where parameters are kept whole, or sharded fully."""

    useful: EffectiveRecompute
    needs: tuple[ActivationNeeds, ...]


class DegreeNode:
    """Degrees, microbatch and sequence parallelism, with the shapes that have them."""

    def __init__(self, core: DegreeSplit, shapes: list[LayerShape], low: Array) -> None:
        self.split, self.shapes = core, shapes
        self.bounds_s = low
        """What every schedule (a row) takes at the least on every shape (a column)."""
        self.bound_s = float(low.min(initial=np.inf))
        self.frame_schedules: list[DegreeSchedule] = []

    @cached_property
    def lower_bound_shape(self) -> LayerShape:
        """One that is nowhere slower than any of them."""
        return find_fastest_shape(self.shapes)


class DegreeNodes:
    """The frames of one question."""

    def __init__(self, question: PlanQuestion, shapes: LayerShapes, pipes: ScheduleOptions) -> None:
        self.question, self.shapes, self.schedule_options = question, shapes, pipes
        self.recompute_options = RecomputeOptions(question, shapes.kernel_times)
        self.stage_contents, self.chunk_layers = (
            StageContentsCache(question),
            ChunkLayerCounts(question.model.layer_names),
        )
        self.sharding_costs = ShardingCosts(question)
        self.sharding_options = ShardingOptions(question, self.sharding_costs)
        self.schedule_bounds = ScheduleBounds(question, pipes, self.recompute_options)

    def expand(
        self, core: DegreeSplit, spread: ExpertParallelSplit, limit_s: float
    ) -> Iterator[DegreeNode]:
        """Yield the frames of a mesh that may stay below a limit."""
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for split, kind in self.shapes.degree_splits.list_context_options(core.tp, core.cp):
            # Those that gather all keys and values at once hold more of them.
            kinds.setdefault((split, kind == "allgather"), []).append(kind)
        plain = self.shapes.build_layout(core, spread)
        for (split, _), some in kinds.items():
            layout = replace(plain, sequence_parallel=split)
            shapes = [
                one for one in self.shapes.list_shapes(layout, some) if one.bound_s() < limit_s
            ]
            frame = self._frame(core, shapes, limit_s) if shapes else None
            if frame is not None:
                yield frame

    def _frame(
        self, core: DegreeSplit, shapes: list[LayerShape], limit_s: float
    ) -> DegreeNode | None:
        """Return those of some shapes that may stay below a limit."""
        loads, run = LayerLoads.from_shapes(shapes, self.schedule_bounds.names), shapes[0].run
        low = self.schedule_bounds.bound_s(core, run, loads, [shape.layout for shape in shapes])
        low = np.maximum(low, [shape.bound_s() for shape in shapes])
        near = np.flatnonzero(low.min(axis=0, initial=np.inf) < limit_s)
        return DegreeNode(core, [shapes[one] for one in near], low[:, near]) if near.size else None

    def build_schedules(self, frame: DegreeNode, limit_s: float) -> float:
        """Find the schedules of a frame that fit and may stay below a limit; return the least."""
        best = float("inf")
        pipes = self.schedule_options.list_options(frame.split, frame.lower_bound_shape.run)
        for pipe, low in zip(pipes, frame.bounds_s.min(axis=1), strict=True):
            if low >= limit_s:
                continue
            staged = DegreeSchedule(self, frame.lower_bound_shape, pipe)
            least = self.bound_s(frame.lower_bound_shape, staged, limit_s)
            if least < limit_s:
                frame.frame_schedules.append(staged)
                best = min(best, least)
        return best

    def bound_s(self, shape: LayerShape, staged: DegreeSchedule, limit_s: float) -> float:
        """Return the least a step takes with the recompute that memory forces on it.

        What is not below a limit is not looked at closely.
        """
        chunks = sum_chunk_times(shape, self.chunk_layers, staged.schedule_option.chunk_layers)
        easiest = bound_ranks(
            shape, staged.schedule_option, chunks, None, staged.stage_contents.in_flight
        )
        if max(map(sum, easiest)) >= limit_s:
            return limit_s
        best = limit_s
        for keeping in list_zero_groups(self.question, shape.layout):
            bound = self._with_tail(shape, staged, easiest, keeping)
            if bound >= best:
                continue
            least = staged.min_recompute_layers_sharded(keeping)
            for option in self.list_recompute_options(shape, keeping):
                layers = least[option.option_index]
                if layers is None:
                    continue
                if layers:
                    more = self.backward_overhead_s(
                        option, staged.schedule_option.chunk_layers, layers
                    )
                    low = bound_ranks(
                        shape, staged.schedule_option, chunks, more, staged.stage_contents.in_flight
                    )
                    bound = self._with_tail(shape, staged, low, keeping)
                best = min(best, bound)
                if not layers:
                    break  # whatever computes something again is slower
        return best

    def _with_tail(
        self, shape: LayerShape, staged: DegreeSchedule, low: list[RankBound], keeping: ZeroGroup
    ) -> float:
        """Return the least that the slowest and the first rank take with their exchange."""
        kinds = self.sharding_options.list_shard_sizes(shape.layout, keeping)
        slowest = max(range(len(low)), key=lambda rank: sum(low[rank]))
        share = shape.run.constants.comm_sm_share
        layers = max(1, self.question.model.layers // shape.layout.pp)
        # Of DualPipe's two chunks each sees half of the microbatches.
        count = shape.microbatches / (2 if staged.schedule_option.schedule == "dualpipe" else 1)
        often = 1.0
        if keeping.max_zero_stage == 2:
            often = grad_scatter_share(shape.microbatches, staged.schedule_option.schedule)
        # Passes side by side are shorter here than what hides the transfers of states.
        longer = 0.0 if staged.schedule_option.schedule in OVERLAPPED_SCHEDULES else 1 - share
        most = sum(low[slowest])
        for rank in {0, slowest}:
            fill, busy, drain = low[rank]
            held = staged.stage_contents.ranks[rank]
            some = self.sharding_costs.list_bounds(
                shape.layout, kinds, keeping.offload, shape.orders, held
            )
            pace = busy / count / layers
            least = float("inf")
            for before, after, update, carried in some:
                # What travels with a layer takes a share of the chip, and time where it is longer.
                wait = share * carried + longer * max(0.0, carried - pace)
                passes = busy + wait * layers * count * often
                whole = max(fill, before) + passes + max(drain, after) + update
                least = min(least, whole)
            most = max(most, least)
        return most

    def list_recompute_options(
        self, shape: LayerShape, keeping: ZeroGroup
    ) -> tuple[RecomputeOption, ...]:
        """Return what may be computed again."""
        key = keeping.shards_parameters, keeping.offloads_activations
        known = shape.recompute_options.get(key)
        if known is None:
            run = shape.run
            if keeping.shards_parameters:
                run = self.question.build_run(replace(shape.layout, zero=3))
            # Where activations go to the host, an option that keeps more may need less at once.
            whole = keeping.offloads_activations
            known = shape.recompute_options[key] = self.recompute_options.list_options(
                run, shape.layers, whole=whole
            )
        return known

    def backward_overhead_s(
        self, option: RecomputeOption, split: tuple[int, ...], layers: int
    ) -> list[float] | None:
        """Return what the backward of every chunk takes longer."""
        if not layers:
            return None
        heads, sizes = self.question.model.multi_token, split
        whole = self.chunk_layers.sum_by_chunk(split, option.seconds)
        if heads is not None:
            sizes = (*split[:-1], split[-1] + heads.depth)
            whole[-1] += heads.depth * option.seconds[heads.block]
        return [
            one if layers >= size else layers / size * one
            for size, one in zip(sizes, whole, strict=True)
        ]
