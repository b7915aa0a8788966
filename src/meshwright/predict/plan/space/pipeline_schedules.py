"""Schedules on a shape: which there are, and how long their passes take at the least.

The bound follows one rank: nothing reaches it before a microbatch has passed the stages ahead of
it, it runs all its passes, and after its last backward the gradient still goes back to the first
stage. For 1F1B and its kin on even stages that is the exact time.
"""

from collections import Counter
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.plan.space.degree_splits import ChunkedSchedule, DegreeSplit, DegreeSplits
from meshwright.predict.plan.space.layer_shapes import KernelTimeCache, LayerShape
from meshwright.predict.plan.space.layer_splits import split_balanced, split_evenly
from meshwright.predict.step.block_time import PassTimes
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import V_SCHEDULES, ScheduleKind

OVERLAPPED_SCHEDULES = frozenset({"dualpipe", "dualpipe-v"})
"""Schedules that run a forward and a backward together, and hide the experts' exchange so."""

_FINE = 20
"""Parts of a mean layer to which costs are rounded before they are balanced."""


class ScheduleOption(NamedTuple):
    """A schedule with a split of the layers."""

    schedule: ScheduleKind
    virtual_stages: int
    chunk_layers: tuple[int, ...]
    """Layers of each chunk."""
    overlap_pp: bool
    """Whether sends run beside compute."""

    def apply_to(self, layout: Layout) -> Layout:
        """Return a layout with this schedule."""
        even = len(set(self.chunk_layers)) == 1
        return replace(
            layout, schedule=self.schedule, virtual_stages=self.virtual_stages,
            stage_layers=None if even else self.chunk_layers, overlap_pp=self.overlap_pp,
        )  # fmt: skip

    def list_rank_chunks(self, pp: int) -> list[list[int]]:
        """Return the chunks of every rank, in model order."""
        if self.schedule == "dualpipe" and pp > 1:
            return [sorted((rank, pp - 1 - rank)) for rank in range(pp)]
        if self.schedule in V_SCHEDULES:
            return [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
        return [list(range(rank, pp * self.virtual_stages, pp)) for rank in range(pp)]


class ScheduleOptions:
    """The schedules of one question's shapes."""

    def __init__(self, degree_splits: DegreeSplits, kernel_times: KernelTimeCache) -> None:
        self.degree_splits, self.kernel_times = degree_splits, kernel_times
        self._known: dict[DegreeSplit, list[ChunkedSchedule]] = {}
        self._splits: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._costs: dict[tuple[object, ...], tuple[int, ...]] = {}

    def list_options(self, core: DegreeSplit, run: TrainingRun) -> list[ScheduleOption]:
        """Return every schedule and split of a run."""
        space = self.degree_splits.space
        # Who sends while computing is never later than who waits for its own sends.
        overlap = core.pp == 1 or max(space.get_allowed("overlap_pp") or (True,))
        return [
            ScheduleOption(schedule, per_rank, split, overlap)
            for schedule, per_rank in self.list_schedules(core)
            for split in self.list_layer_splits(run, core.pp * per_rank)
        ]

    def list_schedules(self, core: DegreeSplit) -> list[ChunkedSchedule]:
        """Return the schedules that a core allows."""
        known = self._known.get(core)
        if known is None:
            known = self._known[core] = self.degree_splits.list_schedules(core)
        return known

    def list_layer_splits(self, run: TrainingRun, chunks: int) -> list[tuple[int, ...]]:
        """Return the splits worth a try: even ones, and those balanced by time."""
        space, layers = self.degree_splits.space, self.degree_splits.question.model.layers
        if "stage_layers" in space.fixed:
            given = (split or split_evenly(layers, chunks) for split in space.fixed["stage_layers"])
            return [s for s in dict.fromkeys(given) if len(s) == chunks and sum(s) == layers]
        if chunks == 1:
            return [(layers,)]
        return list(dict.fromkeys((split_evenly(layers, chunks), self._by_time(run, chunks))))

    def _by_time(self, run: TrainingRun, chunks: int) -> tuple[int, ...]:
        """Return the split whose slowest chunk is fastest."""
        costs = self.get_relative_layer_costs(run)
        key = (chunks, costs)
        known = self._splits.get(key)
        if known is None:
            first, last, *each = costs
            cost = dict(zip((block.name for block in run.model.blocks), each, strict=True))
            row = [cost[name] for name in run.model.layer_names]
            known = self._splits[key] = split_balanced(row, chunks, first, last)
        return known

    def get_relative_layer_costs(self, run: TrainingRun) -> tuple[int, ...]:
        """Return embedding, heads and each kind of layer in parts of a mean layer.

        Only kernels count, wherever experts lie, so that a split is the same for all places.
        """
        kernels, model = self.kernel_times, run.model
        key = kernels.get_dense_kernel_key(run)
        known = self._costs.get(key)
        if known is None:
            each = {block.name: _whole_s(kernels.bound_block(run, block)) for block in model.blocks}
            first, last = map(_whole_s, kernels.get_end_layers(run))
            if model.multi_token is not None:
                last += model.multi_token.depth * each[model.multi_token.block]
            unit = sum(each.values()) / len(each) / _FINE
            known = tuple([round(one / unit) for one in (first, last, *each.values())])
            self._costs[key] = known
        return known


def _whole_s(passes: PassTimes) -> float:
    return passes.forward_s + passes.backward_s


class ChunkTimes(NamedTuple):
    """Seconds of one microbatch in every chunk."""

    forward_s: list[float]
    backward_s: list[float]
    wgrad_s: list[float]
    expert_comm_s: list[float]


class ChunkLayerCounts:
    """The kinds of layers in every chunk of a split."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._known: dict[tuple[int, ...], list[tuple[tuple[str, int], ...]]] = {}

    def count_layers(self, split: tuple[int, ...]) -> list[tuple[tuple[str, int], ...]]:
        """Return how many layers of each kind every chunk holds."""
        known = self._known.get(split)
        if known is None:
            known, start = [], 0
            for size in split:
                known.append(tuple(Counter(self._names[start : start + size]).items()))
                start += size
            self._known[split] = known
        return known

    def sum_by_chunk(self, split: tuple[int, ...], each: dict[str, float]) -> list[float]:
        """Return the sum over every chunk of what each kind of layer has."""
        if len(each) == 1:
            (one,) = each.values()
            return [size * one for size in split]
        return [
            sum([often * each[name] for name, often in kinds]) for kinds in self.count_layers(split)
        ]


def sum_chunk_times(
    shape: LayerShape, cuts: ChunkLayerCounts, split: tuple[int, ...]
) -> ChunkTimes:
    """Return what every chunk of a split takes."""
    columns = []
    for part in range(4):
        each = {name: one[part] for name, one in shape.part_times.items()}
        column = cuts.sum_by_chunk(split, each)
        column[0] += shape.first[part]
        column[-1] += shape.last[part]
        columns.append(column)
    return ChunkTimes(*columns)
