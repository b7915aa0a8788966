"""What may be computed again instead of kept, and which of it is worth a try.

An option that takes longer than another and keeps no less is never better, whatever the pipeline
and the memory, and is left out. What is left is used on as few layers as fit.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.predict.memory.activations import list_recomputed_ops
from meshwright.predict.memory.rank_memory import LayerBytes, layer_bytes
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.layer_shapes import KernelTimeCache, Key, Layers
from meshwright.predict.plan.space.memory_fit import Array, LayerSizes
from meshwright.predict.step.block_comm import BlockComm
from meshwright.predict.step.recompute_time import drop_nested_ops, list_op_kernels, recompute_s
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout, Recompute, RecomputeOp
from meshwright.spec.model import BlockSpec, LatentAttentionSpec, MLPSpec, Model, MoESpec


class RecomputeChoice(NamedTuple):
    """What every layer computes again."""

    recompute: Recompute = "none"
    ops: tuple[RecomputeOp, ...] = ()

    def apply_to(self, layout: Layout, layers: int | None = None) -> Layout:
        """Return a layout that does so on some layers of each chunk."""
        return replace(
            layout, recompute=self.recompute, recompute_ops=self.ops, recompute_layers=layers
        )


NO_RECOMPUTE = RecomputeChoice()


class RecomputeOption(NamedTuple):
    """What is computed again, with its cost for every kind of layer."""

    choice: RecomputeChoice
    option_index: int
    """Its place among all options of a shape."""
    seconds: dict[str, float]
    """Of one layer and microbatch."""


class RecomputeCosts(NamedTuple):
    """What saving activations of one kind of layer costs at the least, of others nothing."""

    kept_bytes_per_token: Array
    """Bytes per token that each kind keeps: this one all, others no more than they must."""
    working: float
    """Bytes per token alive in this kind's backward beside what it keeps."""
    cost_steps: Array
    """Bytes saved with the seconds that takes, from nothing up."""


class EffectiveRecompute(NamedTuple):
    """The sets of operations that save bytes, and what a layer keeps under each."""

    choices: tuple[RecomputeChoice, ...]
    sizes: LayerSizes
    none_index: int | None
    """The place of the empty set."""


def list_recompute_choices(question: PlanQuestion) -> tuple[RecomputeChoice, ...]:
    """Return every set of operations that may be computed again, the empty one first."""
    space, model = question.space, question.model
    kinds = space.get_allowed("recompute") or ()
    found = [NO_RECOMPUTE] if "none" in kinds else []
    if "selective" in kinds:
        sets = space.fixed.get("recompute_ops") or tuple(_sets(model))
        found += [RecomputeChoice("selective", ops) for ops in sets]
    if "full" in kinds:
        found.append(RecomputeChoice("full"))
    return tuple(found)


def _sets(model: Model) -> Iterator[tuple[RecomputeOp, ...]]:
    """Yield the sets of operations that a model has, none with a part of another."""
    blocks = [block for block, _ in model.count_layers_by_block()]
    groups: list[tuple[tuple[RecomputeOp, ...], ...]] = [((), ("core_attn",)), ((), ("layernorm",))]
    if any(isinstance(block.mixer, LatentAttentionSpec) for block in blocks):
        groups.append(((), ("mla_up_proj",)))
    if any(isinstance(block.mlp, MLPSpec) for block in blocks):
        groups.append(((), ("mlp_act",), ("mlp",)))
    if any(isinstance(block.mlp, MoESpec) for block in blocks):
        shared = any(isinstance(b.mlp, MoESpec) and b.mlp.shared_width for b in blocks)
        groups.append(((), ("moe_act",), ("moe",)))
        groups += [((), ("shared_experts",))] if shared else []
    for some in product(*groups):
        ops = tuple(op for group in some for op in group)
        if ops and not {"moe", "shared_experts"} <= set(ops):
            yield ops


class RecomputeOptions:
    """The options of one question, and what they cost on a shape."""

    def __init__(self, question: PlanQuestion, kernel_times: KernelTimeCache) -> None:
        self.question, self.kernel_times = question, kernel_times
        self.choices = list_recompute_choices(question)
        self._useful: dict[Key, EffectiveRecompute] = {}
        self._seconds: dict[Key, dict[str, float]] = {}
        self._options: dict[Key, tuple[RecomputeOption, ...]] = {}

    def list_options(
        self, run: TrainingRun, layers: Layers, *, whole: bool = False
    ) -> tuple[RecomputeOption, ...]:
        """Return the options of a run that no other beats, the quickest first, or all of them."""
        layout = run.layout
        useful = self.find_effective(run)
        # Only whole layers and whole experts repeat their communication.
        passes = tuple([layer.comm.forward_s for layer in layers.values()])
        experts = tuple([layer.comm.ep_forward_s for layer in layers.values()])
        base = (
            *self.kernel_times.get_dense_kernel_key(run),
            layout.zero == 3,
            layout.ep,
            layout.expert_tp,
        )
        key = (*base, layout.cp_kind, passes, experts, whole)
        known = self._options.get(key)
        if known is None:
            options = []
            for row, again in enumerate(useful.choices):
                comm = passes if again.recompute == "full" else ()
                comm = experts if "moe" in again.ops else comm
                at = (*base, again, comm)
                seconds = self._seconds.get(at)
                if seconds is None:
                    seconds = self._seconds[at] = self._each(run, again, layers)
                options.append(RecomputeOption(again, row, seconds))
            options.sort(key=lambda one: (sum(one.seconds.values()), len(one.choice.ops)))
            kept = tuple(options) if whole else _unbeaten(options, useful.sizes)
            known = self._options[key] = kept
        return known

    def get_costs(self, run: TrainingRun, block: BlockSpec) -> RecomputeCosts:
        """Return what saving activations of a kind of layer costs, wherever experts lie.

        Whatever a layer computes again, and however many layers do, what it saves and what that
        takes lie on or above the lower hull of all options.
        """
        agains, sizes, _ = self.find_effective(run)
        column = sizes.names.index(block.name)
        single = {op: self._single(run, op, block) for op in _ops(agains)}
        points = []
        for again, saved in zip(agains, sizes.saved[:, column].tolist(), strict=True):
            ops = list_recomputed_ops(again.apply_to(run.layout), run.framework)
            if again.recompute == "full" or ops == "alternate":
                seconds = self._one(run, again, block)
            else:
                seconds = sum([single[op] for op in drop_nested_ops(again.ops)])
            points.append((saved, seconds))
        least = sizes.without_recompute - sizes.saved.max(axis=0)
        least[column] = sizes.without_recompute[column]
        return RecomputeCosts(least, float(sizes.working[column]), np.array(_hull(points)))

    def _single(self, run: TrainingRun, op: RecomputeOp, block: BlockSpec) -> float:
        """Return what one operation takes at the least."""
        if op != "moe":
            return sum(part.forward_s for _, part in list_op_kernels(run, block, op))
        if not isinstance(block.mlp, MoESpec):
            return 0.0
        return self.kernel_times.bound_experts(run, block.mlp)[0]

    def _one(self, run: TrainingRun, again: RecomputeChoice, block: BlockSpec) -> float:
        run = self.question.build_run(again.apply_to(run.layout))
        return recompute_s(run, block, self.kernel_times.bound_block(run, block), BlockComm())

    def _each(self, run: TrainingRun, again: RecomputeChoice, layers: Layers) -> dict[str, float]:
        run = self.question.build_run(again.apply_to(run.layout))
        return {
            block.name: recompute_s(run, block, layers[block.name].passes, layers[block.name].comm)
            for block in run.model.blocks
            if block.name in layers
        }

    def get_expert_key(self, layout: Layout) -> tuple[int, int]:
        """Return what decides how much the experts of a layout keep."""
        spread = layout.ep if self.question.workload.expert_imbalance > 1 else 1
        return layout.effective_expert_tp, spread

    def find_effective(self, run: TrainingRun) -> EffectiveRecompute:
        """Return the sets of operations worth a try in the layers of a run."""
        layout = run.layout
        # Only those that gather all keys and values hold more of them with more ranks.
        foreign = layout.cp if layout.cp_kind == "allgather" else layout.cp > 1
        key = (
            layout.tp, foreign, layout.cp_kind == "allgather", layout.sequence_parallel,
            *self.get_expert_key(layout), layout.precision, layout.zero == 3,
        )  # fmt: skip
        known = self._useful.get(key)
        if known is None:
            every = {
                again: layer_bytes(self.question.build_run(again.apply_to(layout)))
                for again in self.choices
            }
            agains = tuple(again for again in every if _saves(again, every))
            nothing = agains.index(NO_RECOMPUTE) if NO_RECOMPUTE in agains else None
            known = EffectiveRecompute(
                agains, LayerSizes([every[again] for again in agains]), nothing
            )
            self._useful[key] = known
        return known


def _saves(again: RecomputeChoice, every: dict[RecomputeChoice, dict[str, LayerBytes]]) -> bool:
    """Tell whether a set keeps less than each set with one operation fewer."""
    parts = (
        RecomputeChoice("selective", tuple(op for op in again.ops if op != left))
        for left in again.ops
        if len(again.ops) > 1
    )
    return not any(part in every and _kept(every[part]) == _kept(every[again]) for part in parts)


def _kept(sizes: dict[str, LayerBytes]) -> tuple[float, ...]:
    return tuple([size.with_recompute for size in sizes.values()])


def _unbeaten(options: list[RecomputeOption], sizes: LayerSizes) -> tuple[RecomputeOption, ...]:
    """Leave out of sorted options what another beats: nowhere slower, nowhere more kept."""
    seconds = np.array([list(one.seconds.values()) for one in options])
    costs = np.concatenate([seconds, -sizes.saved[[one.option_index for one in options]]], axis=1)
    no_more = (costs[:, None, :] <= costs[None, :, :]).all(axis=2)
    # Of options that cost the same everywhere the first stays.
    beaten = np.triu(no_more, 1).any(axis=0) | (np.tril(no_more, -1) & ~no_more.T).any(axis=0)
    return tuple([options[index] for index in np.flatnonzero(~beaten)])


def _ops(agains: tuple[RecomputeChoice, ...]) -> set[RecomputeOp]:
    return {op for again in agains for op in again.ops}


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the lower hull of points, from the origin on, slopes rising."""
    corners = [(0.0, 0.0)]
    points = [point for point in points if point[0] > 0]
    while points:
        left, low = corners[-1]
        _, wide = min(((y - low) / (x - left), -x) for x, y in points)
        corners.append((-wide, min(y for x, y in points if x == -wide)))
        points = [point for point in points if point[0] > -wide]
    return corners
