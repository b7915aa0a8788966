"""What a step takes at the least when only its split of the GPUs is known.

Three bounds, each dearer and tighter: kernels with experts at their best; the same with the least
that tensor and context parallelism can cost in any order of the axes; the experts' own kernels and
the least that their exchange can cost.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from meshwright.predict.network import NcclOp, Placement, collective_s
from meshwright.predict.plan.bounds.schedule_bounds import LayerLoads, ScheduleBounds
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.axis_orders import list_allowed_orders, list_expert_placements
from meshwright.predict.plan.space.degree_splits import (
    DegreeSplit,
    DegreeSplits,
    ExpertParallelSplit,
)
from meshwright.predict.plan.space.layer_shapes import Key, LayerShapes
from meshwright.predict.plan.space.memory_fit import Array
from meshwright.predict.step.block_comm import (
    build_group_placement,
    dispatch_bytes,
    dispatch_s,
    list_neighbor_placements,
    predict_block_comm,
    tp_exposed_s,
)
from meshwright.predict.step.block_time import PassTimes
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout
from meshwright.spec.model import MoESpec

_ANYWHERE = ExpertParallelSplit(1, 1)
_BEHIND = PassTimes(0.0, float("inf"), float("inf"))
"""Gradients that hide all communication that they can hide."""


class SplitBounds:
    """Lower bounds of one question's splits."""

    def __init__(
        self,
        question: PlanQuestion,
        degree_splits: DegreeSplits,
        shapes: LayerShapes,
        schedule_bounds: ScheduleBounds,
    ) -> None:
        self.question, self.degree_splits, self.shapes, self.schedule_bounds = (
            question,
            degree_splits,
            shapes,
            schedule_bounds,
        )
        counts, ahead = Counter(question.model.layer_names), question.model.multi_token
        if ahead is not None:
            counts[ahead.block] += ahead.depth
        self._often = np.array([counts[block.name] for block in question.model.blocks], float)
        """Layers of every kind."""
        self._calm: dict[Key, dict[str, float]] = {}
        self._orders: dict[Key, dict[object, str]] = {}
        self._placed: dict[Key, set[tuple[Placement, ...]]] = {}

    def kernels_bound_s(self, core: DegreeSplit) -> float:
        """Return the least that the kernels of a core take, wherever its experts lie."""
        kernels, least = self.shapes.kernel_times, float("inf")
        for split in self._splits(core):
            run = self._run(core, _ANYWHERE, split)
            passes = [kernels.bound_block(run, block) for block in run.model.blocks]
            least = min(least, float(self._evenly(run, _columns([passes]))[0]))
        return least

    def split_bound_s(self, core: DegreeSplit, limit_s: float) -> float:
        """Return the same with communication and with what memory forces on it, below a limit."""
        every = [self._with_memory(core, None, split, limit_s) for split in self._splits(core)]
        return float(np.min(every))

    def mesh_bound_s(
        self, core: DegreeSplit, limit_s: float
    ) -> list[tuple[ExpertParallelSplit, float]]:
        """Return the same for every place of its experts."""
        spreads = self.degree_splits.list_expert_splits(core)
        if not spreads:
            return []
        every = [self._with_memory(core, spreads, split, limit_s) for split in self._splits(core)]
        return list(zip(spreads, np.min(every, axis=0).tolist(), strict=True))

    def _splits(self, core: DegreeSplit) -> set[bool]:
        return {split for split, _ in self.degree_splits.list_context_options(core.tp, core.cp)}

    def _run(self, core: DegreeSplit, spread: ExpertParallelSplit, split: bool) -> TrainingRun:
        layout = self.shapes.build_layout(core, spread)
        kinds = [
            kind
            for one, kind in self.degree_splits.list_context_options(core.tp, core.cp)
            if one == split
        ]
        # Whoever gathers all keys and values at once keeps more of them.
        kind = min(kinds, key=lambda one: one == "allgather")
        return self.question.build_run(
            replace(
                layout,
                sequence_parallel=split,
                cp_kind=kind,
                overlap_tp=self._overlaps(split),
                zero=3,
            )
        )

    def _overlaps(self, split: bool) -> bool:
        """Tell whether tensor-parallel communication may run beside products."""
        return split and max(self.question.space.get_allowed("overlap_tp") or (False,))

    def _evenly(
        self, run: TrainingRun, columns: Array, exchanges: "_Exchanges | None" = None
    ) -> Array:
        """Return what variants take where passes are spread evenly, or one goes there and back."""
        ends, pp = self.shapes.kernel_times.get_end_layers(run), run.layout.pp
        whole = self._often @ columns.sum(axis=1) + sum(
            end.forward_s + end.backward_s for end in ends
        )
        trip = self._often @ columns[:, :2].sum(axis=1)
        trip = trip + sum(end.forward_s + end.dgrad_s for end in ends)
        if exchanges is not None:
            # Side by side with others, all passes of a rank hide the exchange together.
            together, hides = self._often @ exchanges.more, self._often @ exchanges.hides
            behind = run.constants.expert_overlap_share * (whole + together - hides)
            whole = np.minimum(whole, whole + together - np.minimum(hides, behind))
            trip = np.minimum(trip, trip + together - hides)
        even = run.num_microbatches * whole / pp
        return even if pp == 1 else np.maximum(even, trip)  # type: ignore[no-any-return]

    def _with_memory(
        self,
        core: DegreeSplit,
        spreads: list[ExpertParallelSplit] | None,
        split: bool,
        limit_s: float,
    ) -> Array:
        """Return the least of each place of experts; None knows none, and takes the best."""
        runs = [self._run(core, spread, split) for spread in spreads or (_ANYWHERE,)]
        columns, exchanges, owner = self._variants(runs, known=spreads is not None)
        waits = self._comm(core, split)
        for kind, block in enumerate(self.question.model.blocks):
            columns[kind, 1] += waits.get(block.name, 0.0)
        least = self._evenly(runs[0], columns, exchanges)
        near = np.flatnonzero(least < limit_s)
        if near.size:
            loads = self._loads(runs[0], columns[:, :, near], exchanges.of(near))
            layouts = None if spreads is None else [runs[owner[one]].layout for one in near]
            every = self.schedule_bounds.bound_s(core, runs[0], loads, layouts)
            least[near] = np.maximum(least[near], every.min(axis=0, initial=np.inf))
        best = np.full(len(runs), np.inf)
        np.minimum.at(best, owner, least)
        return best

    def _variants(
        self, runs: list[TrainingRun], *, known: bool
    ) -> tuple[Array, "_Exchanges", npt.NDArray[np.intp]]:
        """Return the passes of runs in every order that matters to experts, and whose they are."""
        kernels, blocks = self.shapes.kernel_times, self.question.model.blocks
        found = kernels.get_launch_bound_passes if known else kernels.bound_block
        passes, exchanges, owner = (
            list[list[PassTimes]](),
            list[tuple[_Exchange, ...]](),
            list[int](),
        )
        for number, run in enumerate(runs):
            row = [found(run, block) for block in blocks]
            every = self._experts(run) if known else [(_NOTHING,) * len(blocks)]
            passes += [row] * len(every)
            exchanges += every
            owner += [number] * len(every)
        columns = _columns(passes)
        wait, exchange = np.array(exchanges).transpose(2, 1, 0)
        constants = runs[0].constants
        own = constants.expert_overlap_share * columns.sum(axis=1)
        alone = wait + exchange - (1 - constants.comm_sm_share) * np.minimum(exchange, own)
        columns[:, 1] += alone
        return columns, _Exchanges(wait + exchange - alone, exchange), np.array(owner)

    def _loads(self, run: TrainingRun, columns: Array, exchanges: "_Exchanges") -> LayerLoads:
        forward, inputs, weights = columns[:, 0], columns[:, 1], columns[:, 2]
        ends = np.array(
            [
                [end.forward_s + end.backward_s]
                for end in self.shapes.kernel_times.get_end_layers(run)
            ]
        )
        ends = np.repeat(ends, columns.shape[2], axis=1)
        more, hides = np.zeros_like(ends), np.zeros_like(ends)
        ahead = self.question.model.multi_token
        if ahead is not None:
            row = [block.name for block in self.question.model.blocks].index(ahead.block)
            ends[1] += ahead.depth * columns[row].sum(axis=0)
            more[1] += ahead.depth * exchanges.more[row]
            hides[1] += ahead.depth * exchanges.hides[row]
        return LayerLoads(
            forward, inputs + weights, inputs, ends, exchanges.hides, hides, exchanges.more, more
        )

    def _comm(self, core: DegreeSplit, split: bool) -> dict[str, float]:
        """Return what each kind of layer waits for tensor and context parallelism at the least."""
        plain = self.shapes.build_layout(core, ExpertParallelSplit())
        places = self._distinct(plain)
        # Splits of other ranks may put these groups in the same places.
        key = (core.tp, core.cp, core.microbatch, split, tuple(places))
        known = self._calm.get(key)
        if known is None:
            known = self._calm[key] = self._waits(plain, split, list(places.values()))
        return known

    def _waits(self, plain: Layout, split: bool, orders: list[str]) -> dict[str, float]:
        kinds = [
            kind
            for one, kind in self.degree_splits.list_context_options(plain.tp, plain.cp)
            if one == split
        ]
        least: dict[str, tuple[float, float]] = {}
        # Expert layers may do without communication after their experts.
        blocks = [
            replace(block, mlp=None) if isinstance(block.mlp, MoESpec) else block
            for block in self.question.model.blocks
            if block.mixer is not None or not isinstance(block.mlp, MoESpec)
        ]
        for order in orders:
            for kind in kinds:
                layout = replace(
                    plain,
                    order=order,
                    sequence_parallel=split,
                    cp_kind=kind,
                    overlap_tp=self._overlaps(split),
                )
                run = self.question.build_run(layout)
                for block in blocks:
                    found = predict_block_comm(run, block, _BEHIND)
                    tp, cp = least.get(block.name, (float("inf"), float("inf")))
                    tp = min(tp, found.tp_forward_s + found.tp_backward_s)
                    least[block.name] = tp, min(cp, found.cp_forward_s + found.cp_backward_s)
        return {name: sum(both) for name, both in least.items()}

    def _distinct(self, layout: Layout) -> dict[object, str]:
        """Return the places of tensor and context parallel groups, each with an order."""
        key = (layout.tp, layout.cp, layout.pp, layout.dp)
        known = self._orders.get(key)
        if known is None:
            known = self._orders[key] = {}
            for order in list_allowed_orders(self.question, layout):
                ordered, cluster = replace(layout, order=order), self.question.usable_cluster
                groups = (
                    build_group_placement(cluster, ordered, "tp"),
                    build_group_placement(cluster, ordered, "cp"),
                )
                known.setdefault((groups, list_neighbor_placements(cluster, ordered, "cp")), order)
        return known

    def _experts(self, run: TrainingRun) -> list[tuple["_Exchange", ...]]:
        """Return what layers of every kind exchange for their experts, in all orders worth it."""
        layout = run.layout
        key = (layout.effective_expert_tp, layout.ep, layout.expert_dp, layout.pp)
        places = self._placed.get(key)
        if places is None:
            places = self._placed[key] = list_expert_placements(self.question, layout, "tp", "ep")
        size, every = dispatch_bytes(run), set[tuple[_Exchange, ...]]()
        for shared, spread in places:
            wait = 0.0
            if layout.effective_expert_tp > 1:
                wait = sum(tp_exposed_s(run, _BEHIND, partial(_collective_s, shared, size)))
            every.add(
                tuple(
                    [
                        _Exchange(
                            wait, 4 * dispatch_s(run, block.mlp, spread) if layout.ep > 1 else 0.0
                        )
                        if isinstance(block.mlp, MoESpec)
                        else _NOTHING
                        for block in run.model.blocks
                    ]
                )
            )
        return [one for one in every if not any(_no_more(other, one) for other in every - {one})]


class _Exchange(NamedTuple):
    """What one layer exchanges for its experts in both passes."""

    shared_s: float
    """Between the ranks of one expert."""
    spread_s: float
    """Between experts."""


_NOTHING = _Exchange(0.0, 0.0)


def _no_more(one: tuple[_Exchange, ...], other: tuple[_Exchange, ...]) -> bool:
    """Tell whether one order takes no more time for anything than another."""
    return all(
        a.shared_s <= b.shared_s and a.spread_s <= b.spread_s
        for a, b in zip(one, other, strict=True)
    )


class _Exchanges(NamedTuple):
    """What layers wait for their experts where passes run side by side, by kind and variant."""

    more: Array
    """Longer than each by itself, nothing hidden."""
    hides: Array
    """What of it all passes together may hide."""

    def of(self, some: Array) -> "_Exchanges":
        """Return those of some variants."""
        return _Exchanges(self.more[:, some], self.hides[:, some])


def _collective_s(place: Placement, size: float, op: NcclOp) -> float:
    return collective_s(place, op, size)


def _columns(every: list[list[PassTimes]]) -> Array:
    """Return passes of variants by kind of layer, part and variant."""
    return np.array([[passes[:3] for passes in row] for row in every]).transpose(1, 2, 0)
