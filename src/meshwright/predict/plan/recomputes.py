"""What may be computed again instead of kept, and which of it is worth a try.

An option that takes longer than another and keeps no less is never better, whatever the pipeline
and the memory, and is left out. What is left is used on as few layers as fit.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.predict.activations import recomputed
from meshwright.predict.block_comm import BlockComm
from meshwright.predict.memory import LayerBytes, layer_bytes
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.room import Array, Sizes
from meshwright.predict.plan.shapes import Kernels, Key, Layers
from meshwright.predict.recompute_time import distinct, operation_parts, recompute_s
from meshwright.predict.run import Run
from meshwright.spec.layout import Layout, Recompute, RecomputeOp
from meshwright.spec.model import Block, Experts, LatentAttention, Mlp, Model


class Again(NamedTuple):
    """What every layer computes again."""

    recompute: Recompute = "none"
    ops: tuple[RecomputeOp, ...] = ()

    def on(self, layout: Layout, layers: int | None = None) -> Layout:
        """Return a layout that does so on some layers of each chunk."""
        return replace(
            layout, recompute=self.recompute, recompute_ops=self.ops, recompute_layers=layers
        )


NOTHING = Again()


class Option(NamedTuple):
    """What is computed again, with its cost for every kind of layer."""

    again: Again
    row: int
    """Its place among all options of a shape."""
    seconds: dict[str, float]
    """Of one layer and microbatch."""


class Prices(NamedTuple):
    """What saving activations of one kind of layer costs at the least, of others nothing."""

    kept: Array
    """Bytes per token that each kind keeps: this one all, others no more than they must."""
    working: float
    """Bytes per token alive in this kind's backward beside what it keeps."""
    steps: Array
    """Bytes saved with the seconds that takes, from nothing up."""


class Useful(NamedTuple):
    """The sets of operations that save bytes, and what a layer keeps under each."""

    agains: tuple[Again, ...]
    sizes: Sizes
    nothing: int | None
    """The place of the empty set."""


def choices(question: Question) -> tuple[Again, ...]:
    """Return every set of operations that may be computed again, the empty one first."""
    space, model = question.space, question.model
    kinds = space.allowed("recompute") or ()
    found = [NOTHING] if "none" in kinds else []
    if "selective" in kinds:
        sets = space.fixed.get("recompute_ops") or tuple(_sets(model))
        found += [Again("selective", ops) for ops in sets]
    if "full" in kinds:
        found.append(Again("full"))
    return tuple(found)


def _sets(model: Model) -> Iterator[tuple[RecomputeOp, ...]]:
    """Yield the sets of operations that a model has, none with a part of another."""
    blocks = [block for block, _ in model.block_counts()]
    groups: list[tuple[tuple[RecomputeOp, ...], ...]] = [((), ("core_attn",)), ((), ("layernorm",))]
    if any(isinstance(block.mixer, LatentAttention) for block in blocks):
        groups.append(((), ("mla_up_proj",)))
    if any(isinstance(block.mlp, Mlp) for block in blocks):
        groups.append(((), ("mlp_act",), ("mlp",)))
    if any(isinstance(block.mlp, Experts) for block in blocks):
        shared = any(isinstance(b.mlp, Experts) and b.mlp.shared_width for b in blocks)
        groups.append(((), ("moe_act",), ("moe",)))
        groups += [((), ("shared_experts",))] if shared else []
    for some in product(*groups):
        ops = tuple(op for group in some for op in group)
        if ops and not {"moe", "shared_experts"} <= set(ops):
            yield ops


class Recomputes:
    """The options of one question, and what they cost on a shape."""

    def __init__(self, question: Question, kernels: Kernels) -> None:
        self.question, self.kernels = question, kernels
        self.choices = choices(question)
        self._useful: dict[Key, Useful] = {}
        self._seconds: dict[Key, dict[str, float]] = {}
        self._options: dict[Key, tuple[Option, ...]] = {}

    def of(self, run: Run, layers: Layers, *, whole: bool = False) -> tuple[Option, ...]:
        """Return the options of a run that no other beats, the quickest first, or all of them."""
        layout = run.layout
        useful = self.useful(run)
        # Only whole layers and whole experts repeat their communication.
        passes = tuple([layer.comm.forward for layer in layers.values()])
        experts = tuple([layer.comm.ep_forward for layer in layers.values()])
        base = (*self.kernels.key(run), layout.zero == 3, layout.ep, layout.expert_tp)
        key = (*base, layout.cp_kind, passes, experts, whole)
        known = self._options.get(key)
        if known is None:
            options = []
            for row, again in enumerate(useful.agains):
                comm = passes if again.recompute == "full" else ()
                comm = experts if "moe" in again.ops else comm
                at = (*base, again, comm)
                seconds = self._seconds.get(at)
                if seconds is None:
                    seconds = self._seconds[at] = self._each(run, again, layers)
                options.append(Option(again, row, seconds))
            options.sort(key=lambda one: (sum(one.seconds.values()), len(one.again.ops)))
            kept = tuple(options) if whole else _unbeaten(options, useful.sizes)
            known = self._options[key] = kept
        return known

    def prices(self, run: Run, block: Block) -> Prices:
        """Return what saving activations of a kind of layer costs, wherever experts lie.

        Whatever a layer computes again, and however many layers do, what it saves and what that
        takes lie on or above the lower hull of all options.
        """
        agains, sizes, _ = self.useful(run)
        column = sizes.names.index(block.name)
        single = {op: self._single(run, op, block) for op in _ops(agains)}
        points = []
        for again, saved in zip(agains, sizes.saved[:, column].tolist(), strict=True):
            ops = recomputed(again.on(run.layout), run.software)
            if again.recompute == "full" or ops == "alternate":
                seconds = self._one(run, again, block)
            else:
                seconds = sum([single[op] for op in distinct(again.ops)])
            points.append((saved, seconds))
        least = sizes.whole - sizes.saved.max(axis=0)
        least[column] = sizes.whole[column]
        return Prices(least, float(sizes.working[column]), np.array(_hull(points)))

    def _single(self, run: Run, op: RecomputeOp, block: Block) -> float:
        """Return what one operation takes at the least."""
        if op != "moe":
            return sum(part.forward for _, part in operation_parts(run, block, op))
        if not isinstance(block.mlp, Experts):
            return 0.0
        return self.kernels.least_experts(run, block.mlp)[0]

    def _one(self, run: Run, again: Again, block: Block) -> float:
        run = self.question.run(again.on(run.layout))
        return recompute_s(run, block, self.kernels.least(run, block), BlockComm())

    def _each(self, run: Run, again: Again, layers: Layers) -> dict[str, float]:
        run = self.question.run(again.on(run.layout))
        return {
            block.name: recompute_s(run, block, layers[block.name].passes, layers[block.name].comm)
            for block in run.model.blocks
            if block.name in layers
        }

    def places(self, layout: Layout) -> tuple[int, int]:
        """Return what decides how much the experts of a layout keep."""
        spread = layout.ep if self.question.workload.expert_imbalance > 1 else 1
        return layout.experts_tp, spread

    def useful(self, run: Run) -> Useful:
        """Return the sets of operations worth a try in the layers of a run."""
        layout = run.layout
        # Only those that gather all keys and values hold more of them with more ranks.
        foreign = layout.cp if layout.cp_kind == "allgather" else layout.cp > 1
        key = (
            layout.tp, foreign, layout.cp_kind == "allgather", layout.sequence_parallel,
            *self.places(layout), layout.precision, layout.zero == 3,
        )  # fmt: skip
        known = self._useful.get(key)
        if known is None:
            every = {
                again: layer_bytes(self.question.run(again.on(layout))) for again in self.choices
            }
            agains = tuple(again for again in every if _saves(again, every))
            nothing = agains.index(NOTHING) if NOTHING in agains else None
            known = Useful(agains, Sizes([every[again] for again in agains]), nothing)
            self._useful[key] = known
        return known


def _saves(again: Again, every: dict[Again, dict[str, LayerBytes]]) -> bool:
    """Tell whether a set keeps less than each set with one operation fewer."""
    parts = (
        Again("selective", tuple(op for op in again.ops if op != left))
        for left in again.ops
        if len(again.ops) > 1
    )
    return not any(part in every and _kept(every[part]) == _kept(every[again]) for part in parts)


def _kept(sizes: dict[str, LayerBytes]) -> tuple[float, ...]:
    return tuple([size.kept for size in sizes.values()])


def _unbeaten(options: list[Option], sizes: Sizes) -> tuple[Option, ...]:
    """Leave out of sorted options what another beats: nowhere slower, nowhere more kept."""
    seconds = np.array([list(one.seconds.values()) for one in options])
    costs = np.concatenate([seconds, -sizes.saved[[one.row for one in options]]], axis=1)
    no_more = (costs[:, None, :] <= costs[None, :, :]).all(axis=2)
    # Of options that cost the same everywhere the first stays.
    beaten = np.triu(no_more, 1).any(axis=0) | (np.tril(no_more, -1) & ~no_more.T).any(axis=0)
    return tuple([options[index] for index in np.flatnonzero(~beaten)])


def _ops(agains: tuple[Again, ...]) -> set[RecomputeOp]:
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
