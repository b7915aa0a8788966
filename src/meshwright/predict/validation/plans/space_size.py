"""How many layouts a question's space holds, counted and not listed.

What counts as one layout is what the choices of a search tell apart:

- a split of the GPUs (tp, cp, pp, dp) with a microbatch and a precision, and the places of experts
  (ep, expert_tp);
- an order of the axes: orders that differ only in where axes of one rank stand are one;
- sequence parallelism where tp is above 1, and a kind of context parallelism where cp is;
- a schedule with its chunks per rank and a split of the layers, of the even and the balanced one;
- a set of operations to compute again, none of them part of another, on a number of layers;
- a ZeRO stage with the size of a shard, where there are replicas;
- what goes to the host, activations of a number of layers;
- every switch of overlap, where there is something to overlap.

Layouts that turn out too large for memory count, those that break any other rule do not. Choices
that do not touch each other multiply, so only the splits of the GPUs are gone through.
"""

from collections import Counter

from msgspec.structs import replace

from meshwright.predict.network.placement import count_domain_gpus
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.degree_splits import (
    DegreeSplit,
    DegreeSplits,
    ExpertParallelSplit,
    list_divisors,
)
from meshwright.predict.plan.space.layer_shapes import LayerShapes
from meshwright.predict.plan.space.pipeline_schedules import ScheduleOptions
from meshwright.predict.plan.space.recompute_options import list_recompute_choices
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout.choices import AXES

_BIT = {axis: 1 << place for place, axis in enumerate(AXES)}
_EVERY = (1 << (1 << len(AXES))) - 1
"""A place behind any set of axes."""


def count_layouts(question: PlanQuestion) -> int:
    """Return how many layouts may answer a question, those that do not fit in memory included."""
    return _Size(question).total()


class _Size:
    """Counts one space, keeping the factors that many splits share."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question, self.space = question, question.space
        self.meshes = DegreeSplits(question)
        self.shapes = LayerShapes(question, self.meshes)
        self.pipes = ScheduleOptions(self.meshes, self.shapes.kernel_times)
        self._groups: dict[tuple[int, ...], int] = {}
        self._orders: dict[tuple[object, ...], tuple[int, int]] = {}
        self._chunks: dict[tuple[int, int], Counter[int]] = {}
        self._costs: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._like: dict[tuple[int, ...], TrainingRun] = {}
        self._kept: dict[int, int] = {}
        self._stages: dict[tuple[object, ...], int] = {}
        self._weights: dict[tuple[object, ...], int] = {}

    def total(self) -> int:
        """Return the sum over all splits of the GPUs."""
        return sum(
            self._of_groups(core) * self._of_passes(core) for core in self.meshes.list_splits()
        )

    def _switch(self, name: str, applies: bool) -> int:
        return len(set(self.space.get_allowed(name) or ())) if applies else 1

    # What decides who talks to whom: experts, orders, shards.

    def _of_groups(self, core: DegreeSplit) -> int:
        """Return the choices that depend on the degrees alone."""
        degrees = core[:4]
        known = self._groups.get(degrees)
        if known is None:
            shared = [self._sharings(core.cp, core.dp, first) for first in (core.cp, core.dp)]
            known = 0
            for spread in self.meshes.list_expert_splits(core):
                orders = self._of_orders(core, spread)
                ways = sum(count * each for count, each in zip(orders, shared, strict=True))
                known += ways * self._switch("overlap_ep", spread.ep > 1)
            known = self._groups[degrees] = known * self._switch("overlap_pp", core.pp > 1)
        return known

    def _sharings(self, cp: int, dp: int, first: int) -> int:
        """Return the ZeRO stages with their shards and overlaps.

        A shard fills the first of the two axes or divides it, as `get_mesh_shape` asks.
        """
        spread, zeros = cp * dp, set(self.space.get_allowed("zero") or ())
        if spread == 1:
            return int(0 in zeros)
        allowed = self.space.get_allowed("shard")
        whole: list[int | None] = [None, *list_divisors(spread)[1:-1]]
        shards = sum(
            (shard is None or first % shard == 0 or shard % first == 0)
            and (allowed is None or shard in allowed)
            for shard in whole
        )
        each = shards * self._switch("overlap_parameters", True)
        ways = (0 in zeros) + each * len(zeros - {0})
        return ways * self._switch("overlap_gradients", True)

    def _of_orders(self, core: DegreeSplit, spread: ExpertParallelSplit) -> tuple[int, int]:
        """Return the sound orders of the axes: those with cp before dp, and the others."""
        sizes = {"tp": core.tp, "cp": core.cp, "ep": spread.ep, "dp": core.dp, "pp": core.pp}
        experts = self.question.model.moe is not None
        places = self._places(core, spread)
        active = sum(
            _BIT[axis]
            for axis, size in sizes.items()
            if size > 1 or (experts and axis in ("tp", "dp"))
        )
        key = (active, places)
        known = self._orders.get(key)
        if known is None:
            given = self.space.fixed.get("order")
            known = _ordered(active, places) if given is None else _sound_orders(given, places)
            self._orders[key] = known
        return known

    def _places(self, core: DegreeSplit, spread: ExpertParallelSplit) -> tuple[int, ...]:
        """Return of every axis behind which sets of axes it may stand, as bits."""
        found = dict.fromkeys(AXES, _EVERY)
        dense = _products({"tp": core.tp, "cp": core.cp, "dp": core.dp})
        if self.question.model.moe is None:
            expert = dense
        else:
            width = spread.expert_tp or core.tp
            replicas = core.tp * core.cp * core.dp // (width * spread.ep)
            expert = _products({"tp": width, "ep": spread.ep, "dp": replicas})
            if core.pp > 1:
                # A rank's experts and dense layers are in one stage: `has_matching_expert_stages`.
                found["pp"] = sum(
                    1 << some for some in range(_BIT["pp"]) if dense[some] == expert[some]
                )
        if self.space.fit_scale_up_domain:
            found["tp"] = self._inside(core.tp, dense, core.pp)
            found["cp"] = self._inside(core.cp, dense, core.pp)
            if self.question.model.moe is not None:
                found["tp"] &= self._inside(width, expert, core.pp)
                found["ep"] = self._inside(spread.ep, expert, core.pp)
        return tuple(found.values())

    def _inside(self, ranks: int, strides: list[int], pp: int) -> int:
        """Return behind which sets of axes the first group of some ranks stays in one unit."""
        unit, apart = (
            count_domain_gpus(self.question.cluster),
            [*strides, *(one * pp for one in strides)],
        )
        return sum(1 << some for some, stride in enumerate(apart) if (ranks - 1) * stride < unit)

    # What a rank does with its layers: schedules, splits, recompute, offload.

    def _of_passes(self, core: DegreeSplit) -> int:
        """Return the choices that depend on the microbatch as well."""
        kinds = Counter(split for split, _ in self.meshes.list_context_options(core.tp, core.cp))
        return sum(
            often * self._switch("overlap_tp", split) * self._staged(core, split)
            for split, often in kinds.items()
        )

    def _staged(self, core: DegreeSplit, split: bool) -> int:
        """Return the schedules with their splits, each with what may be recomputed and offloaded.

        Which schedules run depends on the number of microbatches, not on what makes it.
        """
        if core.pp == 1:
            return self._with(self.question.model.layers)
        count = self.question.workload.global_batch // (core.dp * core.microbatch)
        costs = self._costed(core, split, count)
        key = (core.pp, count, costs)
        known = self._stages.get(key)
        if known is None:
            chunks = self._chunks.get((core.pp, count))
            if chunks is None:
                every = self.meshes.list_schedules(core)
                chunks = Counter(core.pp * one.virtual_stages for one in every)
                self._chunks[core.pp, count] = chunks
            known = sum(often * self._weight(costs, number) for number, often in chunks.items())
            self._stages[key] = known
        return known

    def _costed(self, core: DegreeSplit, split: bool, count: int) -> tuple[int, ...]:
        """Return what the layers of a core cost, which decides how they are balanced."""
        key = (core.tp, core.cp, core.microbatch, core.precision, split, count == 1)
        known = self._costs.get(key)
        if known is None:
            layout = replace(
                self.shapes.build_layout(core, ExpertParallelSplit()), sequence_parallel=split
            )
            run = self.question.build_run(layout)
            known = self._costs[key] = self.pipes.get_relative_layer_costs(run)
            self._like.setdefault(known, run)
        return known

    def _weight(self, costs: tuple[int, ...], chunks: int) -> int:
        """Return the splits into so many chunks, with what may be recomputed and offloaded."""
        key = (chunks, costs)
        known = self._weights.get(key)
        if known is None:
            splits = self.pipes.list_layer_splits(self._like[costs], chunks)
            known = self._weights[key] = sum(self._with(max(split)) for split in splits)
        return known

    def _with(self, deepest: int) -> int:
        """Return what may be recomputed and offloaded of chunks with so many layers."""
        known = self._kept.get(deepest)
        if known is None:
            agains, offloads = (
                list_recompute_choices(self.question),
                set(self.space.get_allowed("offload") or ()),
            )
            layers = self._layers("recompute_layers", deepest)
            again = sum(1 if one.recompute == "none" else layers for one in agains)
            layers = self._layers("offload_layers", deepest)
            away = sum(layers if "activations" in one else 1 for one in offloads)
            known = self._kept[deepest] = again * away
        return known

    def _layers(self, name: str, deepest: int) -> int:
        given = self.space.get_allowed(name)
        if given is None:
            return deepest
        every = {deepest if one is None else one for one in given}
        return sum(one <= deepest for one in every)


def _products(sizes: dict[str, int]) -> list[int]:
    """Return the ranks that every set of axes but pp spans."""
    found = [1]
    for axis in AXES[:-1]:
        found += [one * sizes.get(axis, 1) for one in found]
    return found


def _ordered(active: int, places: tuple[int, ...]) -> tuple[int, int]:
    """Return how many orders of some axes put each where it may stand, by which of cp, dp is first.

    Whether an axis may come next depends on the set of axes before it, so sets are enough.
    """
    ways = {0: (1, 0, 0)}
    for some in range(1, active + 1):
        if some & ~active:
            continue
        neither = cp_first = dp_first = 0
        for (axis, bit), place in zip(_BIT.items(), places, strict=True):
            if not some & bit or not place >> (some ^ bit) & 1:
                continue
            before = ways[some ^ bit]
            cp_first, dp_first = cp_first + before[1], dp_first + before[2]
            if axis == "cp":
                cp_first += before[0]
            elif axis == "dp":
                dp_first += before[0]
            else:
                neither += before[0]
        ways[some] = neither, cp_first, dp_first
    neither, cp_first, dp_first = ways[active]
    return neither + cp_first, dp_first


def _sound_orders(given: tuple[str, ...], places: tuple[int, ...]) -> tuple[int, int]:
    """Return how many of some orders put every axis where it may stand, by cp or dp first."""
    found = [0, 0]
    where = dict(zip(AXES, places, strict=True))
    for order in set(given):
        before, sound = 0, True
        for axis in order.split("-"):
            sound = sound and bool(where[axis] >> before & 1)
            before |= _BIT[axis]
        found[order.index("dp") < order.index("cp")] += sound
    return found[0], found[1]
