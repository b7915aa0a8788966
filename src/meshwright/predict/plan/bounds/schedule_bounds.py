"""The least that each schedule takes on a split of the GPUs, memory included, for all at once.

What a schedule does with the first and last rank and one between does not depend on how long
layers take, so it is worked out once: layers run and held, layers that come before, a microbatch's
trip to the end and back. A bound for all schedules is then a few products of arrays. Where the
layers held do not fit, some are computed again, and that takes at least what the lower hull of all
recompute options says.
"""

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.predict.memory.buffers import MEMORY_CONSTANTS, runtime_bytes
from meshwright.predict.memory.rank_memory import activation_budget_bytes, count_schedule_in_flight
from meshwright.predict.plan.bounds.state_bounds import LayerStateBounds
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.degree_splits import DegreeSplit
from meshwright.predict.plan.space.layer_shapes import Key, LayerShape
from meshwright.predict.plan.space.memory_fit import Array
from meshwright.predict.plan.space.pipeline_schedules import (
    OVERLAPPED_SCHEDULES,
    ChunkLayerCounts,
    ScheduleOption,
    ScheduleOptions,
)
from meshwright.predict.plan.space.recompute_options import RecomputeCosts, RecomputeOptions
from meshwright.predict.plan.space.sharding_cost import count_last_microbatches
from meshwright.predict.plan.space.zero_groups import ZeroGroup, list_zero_groups
from meshwright.predict.step.pipeline_bubble import NO_BARRIER_SCHEDULES
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout


class ScheduleProfile(NamedTuple):
    """Numbers of layers, by schedule, rank and kind of layer."""

    executed_layers: Array
    """Run for every microbatch."""
    stored_layers: Array
    """Whose states it keeps."""
    in_flight: Array
    """Held at once, each microbatch in flight counted."""
    upstream_layers: Array
    """In the chunks ahead of the rank's own, where they have to be passed both ways."""
    downstream_layers: Array
    """From the rank's first chunk to the end, where it idles until the way back."""
    return_layers: Array
    """On the way back to its last chunk."""
    overlapped_forwards: Array
    """In the forward passes that it may run meanwhile."""
    end_layers: Array
    """Embedding and heads instead of kinds of layers: those that it runs."""
    recompute_floor_share: Array
    """What covering all layers of the commonest kind costs at the least, as a share of what they
    cost by themselves: layers behind them share the price, which goes by numbers of layers."""
    is_overlapped: Array
    """Whether a schedule runs passes side by side."""
    last_microbatches: Array
    """Last microbatches of a schedule's chunks, whose gradients ZeRO 2 does not scatter."""


class LayerLoads(NamedTuple):
    """The least that layers take: a row for each kind of them, a column for each variant."""

    forward: Array
    backward: Array
    dgrad: Array
    """What of backward the stage before waits for."""
    ends: Array
    """Embedding and heads instead of kinds of layers, both passes."""
    hideable_comm: Array
    """What of both passes those that run side by side may hide."""
    ends_hideable_comm: Array
    """The same of embedding and heads."""
    overlap_cost: Array
    """What both passes take longer before that, where they run side by side."""
    ends_overlap_cost: Array
    """The same of embedding and heads."""

    @classmethod
    def from_shapes(cls, shapes: list[LayerShape], names: list[str]) -> "LayerLoads":
        """Return what the layers of shapes take."""
        every = np.array([[shape.part_times[name] for name in names] for shape in shapes])
        forward, backward, weights, exchange = every.transpose(2, 1, 0)
        ends = np.array([[shape.first, shape.last] for shape in shapes]).transpose(2, 1, 0)
        # Where a switch hides the exchange, passes side by side hide no more of it.
        shown = np.array([not shape.layout.overlap_ep for shape in shapes])
        exchange, ends_exchange = exchange * shown, ends[3] * shown
        return cls(
            forward, backward, backward - weights, ends[0] + ends[1], exchange, ends_exchange,
            np.zeros_like(exchange), np.zeros_like(ends_exchange),
        )  # fmt: skip

    @property
    def variants(self) -> int:
        """How many there are."""
        return int(self.forward.shape[1])


class ScheduleBounds:
    """The profiles of one question."""

    def __init__(
        self,
        question: PlanQuestion,
        schedule_options: ScheduleOptions,
        recompute_options: RecomputeOptions,
    ) -> None:
        self.question, self.schedule_options, self.recompute_options = (
            question,
            schedule_options,
            recompute_options,
        )
        self.names = [block.name for block in question.model.blocks]
        self.state_bounds = LayerStateBounds(question)
        self._cuts = ChunkLayerCounts(question.model.layer_names)
        counts = [question.model.layer_names.count(name) for name in self.names]
        self._main = counts.index(max(counts))
        """The kind of which there are most layers."""
        self._profiles: dict[Key, ScheduleProfile] = {}
        self._prices: dict[Key, RecomputeCosts] = {}

    def bound_s(
        self, core: DegreeSplit, run: TrainingRun, loads: LayerLoads, layouts: list[Layout] | None
    ) -> Array:
        """Return the least that every schedule (a row) takes with every variant (a column).

        `layouts` are those of the variants, None where nobody knows where their experts lie.
        """
        profile, count = self._profile(core, run), run.num_microbatches
        both = loads.forward + loads.backward
        own = profile.executed_layers @ both + profile.end_layers @ loads.ends
        inputs = profile.return_layers @ loads.dgrad
        if loads.hideable_comm.any():
            paired = profile.is_overlapped[:, None, None]
            exchange = (
                profile.executed_layers @ loads.hideable_comm
                + profile.end_layers @ loads.ends_hideable_comm
            )
            more = (
                profile.executed_layers @ loads.overlap_cost
                + profile.end_layers @ loads.ends_overlap_cost
            )
            behind = run.constants.expert_overlap_share * (own + more - exchange)
            own = own + paired * (more - np.minimum(exchange, behind))
            inputs = inputs + paired * (
                profile.return_layers @ (loads.overlap_cost - loads.hideable_comm)
            )
        # Forward passes may take longer than here, so idling counts where they are no more.
        ahead = profile.downstream_layers - profile.overlapped_forwards
        idles = np.all(ahead >= 0, axis=2, keepdims=True)
        once = profile.upstream_layers @ both + np.where(idles, ahead @ loads.forward + inputs, 0.0)
        least = np.full((len(own), loads.variants), np.inf)
        share = run.constants.comm_sm_share
        # Passes side by side are shorter here than what hides the transfers of states.
        longer = (1 - share) * ~profile.is_overlapped[:, None, None]
        for keeping in list_zero_groups(self.question, run.layout):
            kept, travels = self._states(run, keeping, layouts)
            if keeping.offloads_activations:
                room = activation_budget_bytes(run, runtime_bytes(run, MEMORY_CONSTANTS))
                busy = np.where(profile.stored_layers @ kept <= room, own, np.inf)
            else:
                busy = own + self._again(run, profile, kept, layouts, keeping.shards_parameters)
            if travels is not None:
                # What travels with a layer takes a share of the chip, and time where it is longer.
                carried = profile.executed_layers @ travels
                pace = np.where(np.isfinite(busy), busy, 0.0)
                wait = share * carried + longer * np.maximum(0.0, carried - pace)
                if keeping.max_zero_stage == 2:
                    wait = wait * np.maximum(
                        0.0, 1 - profile.last_microbatches[:, None, None] / count
                    )
                busy = busy + wait
            least = np.minimum(least, (once + count * busy).max(axis=1))
        return least

    def _states(
        self, run: TrainingRun, keeping: ZeroGroup, layouts: list[Layout] | None
    ) -> tuple[Array, Array | None]:
        """Return what states of a layer keep, and how long they travel if they do."""
        if layouts is None:
            return self.state_bounds.min_state_bytes(run.layout, keeping, experts=False)[
                :, None
            ], None
        kept = [
            self.state_bounds.min_state_bytes(layout, keeping, experts=True) for layout in layouts
        ]
        if keeping.max_zero_stage < 2:
            return np.array(kept).T, None
        travels = [self.state_bounds.min_comm_s(layout, keeping) for layout in layouts]
        return np.array(kept).T, np.array(travels).T

    def _again(
        self,
        run: TrainingRun,
        profile: ScheduleProfile,
        states: Array,
        layouts: list[Layout] | None,
        sharded: bool,
    ) -> Array:
        """Return the recompute per microbatch that memory forces on schedules, ranks and variants.

        What layers keep depends on the places of their experts.
        """
        if layouts is None:
            return self._forced(run, profile, states, sharded)
        places = [self.recompute_options.get_expert_key(layout) for layout in layouts]
        again = np.empty((*profile.executed_layers.shape[:2], len(layouts)))
        for one in set(places):
            some = [index for index, place in enumerate(places) if place == one]
            alike = self.question.build_run(replace(layouts[some[0]], zero=run.layout.zero))
            again[:, :, some] = self._forced(alike, profile, states[:, some], sharded)
        return again

    def _forced(
        self, run: TrainingRun, profile: ScheduleProfile, states: Array, sharded: bool
    ) -> Array:
        """Return the same for variants that keep the same.

        Kinds of layers that are few are taken to save all they can for nothing.
        """
        prices, main = self._price(run, sharded), self._main
        room = activation_budget_bytes(run, runtime_bytes(run, MEMORY_CONSTANTS))
        budget = (room - profile.stored_layers @ states) / run.microbatch_tokens
        # The layer in backward has back what it did not keep, at least what layers save on average.
        has = profile.stored_layers[:, :, main] > 0
        needs = profile.in_flight @ prices.kept_bytes_per_token + prices.working * has
        lack = needs[:, :, None] - budget
        short = lack > 0
        if not short.any():
            return np.zeros(lack.shape)
        spare = np.broadcast_to(
            np.maximum(profile.in_flight[:, :, main] - 1, 0.0)[:, :, None], lack.shape
        )
        each = np.full(lack.shape, np.inf)
        np.divide(lack, spare, out=each, where=short & (spare > 0))
        each[~short] = 0.0
        seconds = np.interp(each, prices.cost_steps[:, 0], prices.cost_steps[:, 1], right=np.inf)
        again = np.full(lack.shape, np.inf)
        runs = (profile.executed_layers[:, :, main] * profile.recompute_floor_share[:, :, 0])[
            :, :, None
        ]
        runs = np.broadcast_to(runs, lack.shape)
        np.multiply(seconds, runs, out=again, where=np.isfinite(seconds))
        return again

    def _profile(self, core: DegreeSplit, run: TrainingRun) -> ScheduleProfile:
        if run.layout.zero:
            run = self.question.build_run(
                replace(run.layout, zero=0)
            )  # as shapes find their splits
        schedules = tuple(self.schedule_options.list_schedules(core))
        flying = min(run.num_microbatches, 2 * core.pp)
        exact = (
            run.num_microbatches if any(one.schedule == "gpipe" for one in schedules) else flying
        )
        key = (core.pp, exact, schedules, self.schedule_options.get_relative_layer_costs(run))
        known = self._profiles.get(key)
        if known is None:
            pipes = self.schedule_options.list_options(core, run)
            every = [self._one(run, pipe) for pipe in pipes]
            ranks = len(_watched(core.pp))
            widths = [len(self.names)] * 7 + [2, 1]
            parts = [
                np.array([one[part] for one in every]).reshape((len(every), ranks, width))
                for part, width in enumerate(widths)
            ]
            parts.append(np.array([pipe.schedule in OVERLAPPED_SCHEDULES for pipe in pipes], bool))
            parts.append(
                np.array([count_last_microbatches(pipe.schedule) for pipe in pipes], float)
            )
            known = self._profiles[key] = ScheduleProfile(*parts)
        return known

    def _one(self, run: TrainingRun, pipe: ScheduleOption) -> tuple[Array, ...]:
        """Return the profile of one schedule, a row for each rank that is watched."""
        pp = run.layout.pp
        cuts = self._cuts.count_layers(pipe.chunk_layers)
        kinds = np.array([[dict(cut).get(name, 0) for name in self.names] for cut in cuts], float)
        peaks = count_schedule_in_flight(pipe.apply_to(run.layout), run.num_microbatches)
        ranks, rows = pipe.list_rank_chunks(pp), []
        alone = pipe.schedule in NO_BARRIER_SCHEDULES or pipe.schedule in OVERLAPPED_SCHEDULES
        for rank in _watched(pp):
            own, nothing = ranks[rank], np.zeros(len(self.names))
            whole = kinds[own].sum(axis=0)
            # Of DualPipe's two chunks each sees half of the microbatches.
            halves = len(own) // pipe.virtual_stages
            row = [whole / halves, whole, whole * peaks[rank] / len(own)]
            if pp == 1 or not alone:
                row += [kinds[: own[0]].sum(axis=0), nothing, nothing, nothing]
            else:
                widest = kinds[own].max(axis=0) * peaks[rank]
                there, back = kinds[own[0] :].sum(axis=0), kinds[own[-1] + 1 :].sum(axis=0)
                row += [nothing, there, back, widest]
            row.append(np.array([0 in own, len(cuts) - 1 in own]) / halves)
            row.append(np.array([min(self._first(pipe.chunk_layers, chunk) for chunk in own)]))
            rows.append(row)
        return tuple(np.array([row[part] for row in rows]) for part in range(9))

    def _first(self, split: tuple[int, ...], chunk: int) -> float:
        """Return the share of the commonest layers in a chunk where others come after one."""
        start = sum(split[:chunk])
        names = self.question.model.layer_names[start : start + split[chunk]]
        main = self.names[self._main]
        if main not in names or set(names[names.index(main) :]) == {main}:
            return 1.0
        return names.count(main) / len(names)

    def _price(self, run: TrainingRun, sharded: bool) -> RecomputeCosts:
        layout = run.layout
        if (layout.zero == 3) != sharded:
            run = self.question.build_run(replace(layout, zero=3 if sharded else 0))
        places = self.recompute_options.get_expert_key(layout)
        key = (
            *self.recompute_options.kernel_times.get_dense_kernel_key(run),
            layout.cp_kind,
            places,
            sharded,
        )
        known = self._prices.get(key)
        if known is None:
            main = run.model.blocks[self._main]
            known = self._prices[key] = self.recompute_options.get_costs(run, main)
        return known


def _watched(pp: int) -> tuple[int, ...]:
    """Return the ranks that bounds look at: both ends, and one in the middle."""
    return tuple(dict.fromkeys((0, pp // 2, pp - 1)))
