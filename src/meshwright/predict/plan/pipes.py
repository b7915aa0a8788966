"""Schedules on a shape: which there are, and how long their passes take at the least.

The bound follows one rank: nothing reaches it before a microbatch has passed the stages ahead of
it, it runs all its passes, and after its last backward the gradient still goes back to the first
stage. For 1F1B and its kin on even stages that is the exact time.
"""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.block_time import Passes
from meshwright.predict.bubble import ENDS_APART
from meshwright.predict.plan.meshes import Core, Interleaving, Meshes
from meshwright.predict.plan.shapes import Kernels, Shape
from meshwright.predict.plan.splits import balanced, light_ends
from meshwright.predict.run import Run
from meshwright.spec.layout import Layout
from meshwright.spec.layout.kinds import FOLDED_SCHEDULES, ScheduleKind

PAIRED = frozenset({"dualpipe", "dualpipe-v"})
"""Schedules that run a forward and a backward together, and hide the experts' exchange so."""
_FINE = 20
"""Parts of a mean layer to which costs are rounded before they are balanced."""


class Pipe(NamedTuple):
    """A schedule with a split of the layers."""

    schedule: ScheduleKind
    virtual_stages: int
    split: tuple[int, ...]
    """Layers of each chunk."""
    overlap: bool
    """Whether sends run beside compute."""

    def on(self, layout: Layout) -> Layout:
        """Return a layout with this schedule."""
        even = len(set(self.split)) == 1
        return replace(
            layout, schedule=self.schedule, virtual_stages=self.virtual_stages,
            stage_layers=None if even else self.split, overlap_pp=self.overlap,
        )  # fmt: skip

    def ranks(self, pp: int) -> list[list[int]]:
        """Return the chunks of every rank, in model order."""
        if self.schedule == "dualpipe" and pp > 1:
            return [sorted((rank, pp - 1 - rank)) for rank in range(pp)]
        if self.schedule in FOLDED_SCHEDULES:
            return [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
        return [list(range(rank, pp * self.virtual_stages, pp)) for rank in range(pp)]


class Pipes:
    """The schedules of one question's shapes."""

    def __init__(self, meshes: Meshes, kernels: Kernels) -> None:
        self.meshes, self.kernels = meshes, kernels
        self._known: dict[Core, list[Interleaving]] = {}
        self._splits: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._costs: dict[tuple[object, ...], tuple[int, ...]] = {}

    def of(self, core: Core, run: Run) -> list[Pipe]:
        """Return every schedule and split of a run."""
        space = self.meshes.space
        # Who sends while computing is never later than who waits for its own sends.
        overlap = core.pp == 1 or max(space.allowed("overlap_pp") or (True,))
        return [
            Pipe(schedule, per_rank, split, overlap)
            for schedule, per_rank in self.interleavings(core)
            for split in self.splits(run, core.pp * per_rank)
        ]

    def interleavings(self, core: Core) -> list[Interleaving]:
        """Return the schedules that a core allows."""
        known = self._known.get(core)
        if known is None:
            known = self._known[core] = self.meshes.interleavings(core)
        return known

    def splits(self, run: Run, chunks: int) -> list[tuple[int, ...]]:
        """Return the splits worth a try: even ones, and those balanced by time."""
        space, layers = self.meshes.space, self.meshes.question.model.layers
        if "stage_layers" in space.fixed:
            given = (split or light_ends(layers, chunks) for split in space.fixed["stage_layers"])
            return [s for s in dict.fromkeys(given) if len(s) == chunks and sum(s) == layers]
        if chunks == 1:
            return [(layers,)]
        return list(dict.fromkeys((light_ends(layers, chunks), self._by_time(run, chunks))))

    def _by_time(self, run: Run, chunks: int) -> tuple[int, ...]:
        """Return the split whose slowest chunk is fastest."""
        costs = self.costs(run)
        key = (chunks, costs)
        known = self._splits.get(key)
        if known is None:
            first, last, *each = costs
            cost = dict(zip((block.name for block in run.model.blocks), each, strict=True))
            row = [cost[name] for name in run.model.layer_names]
            known = self._splits[key] = balanced(row, chunks, first, last)
        return known

    def costs(self, run: Run) -> tuple[int, ...]:
        """Return embedding, heads and each kind of layer in parts of a mean layer.

        Only kernels count, wherever experts lie, so that a split is the same for all places.
        """
        kernels, model = self.kernels, run.model
        key = kernels.key(run)
        known = self._costs.get(key)
        if known is None:
            each = {block.name: _whole_s(kernels.least(run, block)) for block in model.blocks}
            first, last = map(_whole_s, kernels.ends(run))
            if model.multi_token is not None:
                last += model.multi_token.depth * each[model.multi_token.block]
            unit = sum(each.values()) / len(each) / _FINE
            known = tuple([round(one / unit) for one in (first, last, *each.values())])
            self._costs[key] = known
        return known


def _whole_s(passes: Passes) -> float:
    return passes.forward + passes.backward


class Chunks(NamedTuple):
    """Seconds of one microbatch in every chunk."""

    forward: list[float]
    backward: list[float]
    weight_gradient: list[float]
    experts: list[float]


class Cuts:
    """The kinds of layers in every chunk of a split."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._known: dict[tuple[int, ...], list[tuple[tuple[str, int], ...]]] = {}

    def of(self, split: tuple[int, ...]) -> list[tuple[tuple[str, int], ...]]:
        """Return how many layers of each kind every chunk holds."""
        known = self._known.get(split)
        if known is None:
            known, start = [], 0
            for size in split:
                known.append(tuple(Counter(self._names[start : start + size]).items()))
                start += size
            self._known[split] = known
        return known

    def sums(self, split: tuple[int, ...], each: dict[str, float]) -> list[float]:
        """Return the sum over every chunk of what each kind of layer has."""
        if len(each) == 1:
            (one,) = each.values()
            return [size * one for size in split]
        return [sum([often * each[name] for name, often in kinds]) for kinds in self.of(split)]


def chunk_times(shape: Shape, cuts: Cuts, split: tuple[int, ...]) -> Chunks:
    """Return what every chunk of a split takes."""
    columns = []
    for part in range(4):
        each = {name: one[part] for name, one in shape.parts.items()}
        column = cuts.sums(split, each)
        column[0] += shape.first[part]
        column[-1] += shape.last[part]
        columns.append(column)
    return Chunks(*columns)


class Floor(NamedTuple):
    """The least a rank takes: until it starts, its passes, and what others do after it."""

    fill_s: float
    busy_s: float
    drain_s: float


def floors(
    shape: Shape, pipe: Pipe, chunks: Chunks, more: list[float] | None, flying: tuple[int, ...]
) -> list[Floor]:
    """Return the floors of every rank.

    `more` is what every chunk's backward takes longer, `flying` how many passes of one chunk each
    rank holds activations of at the most.
    """
    layout, count = shape.layout, shape.microbatches
    forward, backward = chunks.forward, chunks.backward
    if more is not None:
        backward = [a + b for a, b in zip(backward, more, strict=True)]
    if layout.pp == 1:
        return [Floor(0.0, count * (forward[0] + backward[0]), 0.0)]
    passes = [f + b for f, b in zip(forward, backward, strict=True)]
    held = pipe.ranks(layout.pp)
    if pipe.schedule in ENDS_APART or pipe.schedule in PAIRED:
        times = count / 2 if pipe.schedule == "dualpipe" else count
        busy = [times * sum([passes[chunk] for chunk in own]) for own in held]
        if pipe.schedule in PAIRED and not layout.overlap_ep:
            hide = shape.run.constants.expert_hidden
            for rank, own in enumerate(held):
                exchange = times * sum([chunks.experts[chunk] for chunk in own])
                busy[rank] -= min(exchange, hide * (busy[rank] - exchange))
            passes = [a - b for a, b in zip(passes, chunks.experts, strict=True)]
        idle = _idle_s(shape, chunks, passes, held, flying)
        return [Floor(wait, one, 0.0) for one, wait in zip(busy, idle, strict=True)]
    hop, found = shape.hop_s, []
    before = after = 0.0
    for rank, own in enumerate(held):
        busy_s = passes[own[0]] if len(own) == 1 else sum([passes[chunk] for chunk in own])
        found.append(Floor(before, count * busy_s, after))
        before += forward[rank] + hop
        after += backward[rank] + hop
    return found


def _idle_s(
    shape: Shape,
    chunks: Chunks,
    passes: list[float],
    held: list[list[int]],
    flying: tuple[int, ...],
) -> list[float]:
    """Return how long each rank idles at the least before its first backward.

    From its first forward the microbatch goes on to the end of the model and back; meanwhile the
    rank has nothing to do but forwards, and no more of them than it holds activations of.
    """
    forward, hop = chunks.forward, shape.hop_s
    inputs = [
        one - ahead - weights
        for one, ahead, weights in zip(passes, forward, chunks.weight_gradient, strict=True)
    ]
    ahead, back = [*accumulate(forward, initial=0.0)], [*accumulate(inputs, initial=0.0)]
    found, last = [], len(forward) - 1
    for own, most in zip(held, flying, strict=True):
        first, final = own[0], own[-1]
        trip = ahead[-1] - ahead[first] + back[-1] - back[final + 1]
        trip += hop * (last - first + last - final)
        found.append(max(0.0, trip - most * max([forward[chunk] for chunk in own])))
    return found
