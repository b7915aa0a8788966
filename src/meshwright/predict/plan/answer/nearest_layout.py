"""The layout of a question that needs least memory, whether it fits or not.

Only extremes are tried: the smallest microbatch, the strongest recompute, states shared as widely
and moved to the host as far as allowed. Splits are tried in the order of a rough estimate, and the
best of them are then held against every schedule and every way to share. So the answer is close to
the least and may miss it, but what it says of its layout is the prediction itself.
`find_simplest_layout` looks for a layout that fits with little of all that.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.memory.rank_memory import layer_bytes
from meshwright.predict.network.placement import count_domain_gpus
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.axis_orders import list_allowed_orders
from meshwright.predict.plan.space.degree_splits import (
    ChunkedSchedule,
    DegreeSplit,
    DegreeSplits,
    ExpertParallelSplit,
    list_divisors,
)
from meshwright.predict.plan.space.layer_shapes import LayerShapes
from meshwright.predict.plan.space.layer_splits import split_evenly
from meshwright.predict.plan.space.pipeline_schedules import ScheduleOptions
from meshwright.predict.plan.space.recompute_options import RecomputeChoice, list_recompute_choices
from meshwright.spec.layout import Layout, Offload
from meshwright.spec.model import count_parameters

_FINALISTS = 3
"""Splits that are held against every schedule and way to share."""
_LIGHT = (
    "1f1b", "zb-h1", "zb-v", "dualpipe-v", "dualpipe", "zb-h2", "interleaved", "gpipe",
)  # fmt: skip
"""Schedules, those with few microbatches in flight first."""


class NearestLayout(NamedTuple):
    """A layout with the memory of its fullest rank."""

    layout: Layout
    stage: int
    """The pipeline stage of that rank."""
    needed_bytes: int
    capacity_bytes: int
    """What may be used."""

    @property
    def missing_bytes(self) -> int:
        """What it needs too much; negative where it fits."""
        return self.needed_bytes - self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits after all."""
        return self.missing_bytes <= 0


def find_nearest_layout(question: PlanQuestion, *, tries: int) -> NearestLayout | None:
    """Return a layout that fits, or else the one closest to fitting; None where none is sound.

    `tries` is how many splits of the GPUs, with the places of experts, are looked at.
    """
    return _Extremes(question).least(tries)


def find_simplest_layout(
    question: PlanQuestion, found: NearestLayout, *, tries: int
) -> NearestLayout:
    """Return a layout that fits as well as a found one and is split less, if there is one."""
    return _Extremes(question).plainer(found, tries)


class _Mesh(NamedTuple):
    """A split of the GPUs with its microbatches, the smallest first."""

    rough_bytes: float
    cores: list[DegreeSplit]
    spread: ExpertParallelSplit

    def split(self, unit: int) -> float:
        """Return how far it splits the model, groups that leave a unit counting more."""
        core = self.cores[0]
        inside = core.tp * core.cp
        width = self.spread.ep * (self.spread.expert_tp or 1)
        return inside * core.cp * core.pp * max(1.0, inside / unit) * sqrt(width)


class _Extremes:
    """Looks for little memory in one space."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question, self.space = question, question.space
        self.meshes = DegreeSplits(question)
        self.shapes = LayerShapes(question, self.meshes)
        self.pipes = ScheduleOptions(self.meshes, self.shapes.kernel_times)
        parameters = count_parameters(question.model)
        self.experts = parameters.experts
        self.dense = parameters.total - parameters.experts
        self.zeros = sorted(set(self.space.get_allowed("zero") or ()), reverse=True)
        self.offloads: list[tuple[Offload, ...]] = sorted(
            set(self.space.get_allowed("offload") or ()), key=len, reverse=True
        )
        self.agains = self._agains()
        self._schedules: dict[tuple[int, int], list[ChunkedSchedule]] = {}

    def least(self, tries: int) -> NearestLayout | None:
        """Return what comes nearest to fitting, or the first that fits."""
        if not (self.zeros and self.offloads and self.agains):
            return None
        found: list[tuple[NearestLayout, DegreeSplit, ExpertParallelSplit]] = []
        for mesh in sorted(self._meshes(), key=lambda mesh: mesh.rough_bytes)[:tries]:
            core, best = self._tried(mesh, self.offloads[:1])
            if best is not None:
                if best.fits:
                    return best
                found.append((best, core, mesh.spread))
        found.sort(key=lambda one: one[0].needed_bytes)
        closest = [one[0] for one in found[:1]]
        for _, core, spread in found[:_FINALISTS]:
            best = _best(self._thorough(core, spread))
            if best is not None:
                if best.fits:
                    return best
                closest.append(best)
        return min(closest, key=lambda one: one.needed_bytes, default=None)

    def plainer(self, found: NearestLayout, tries: int) -> NearestLayout:
        """Return what fits and splits the model least, with as little in host memory as it may."""
        unit = count_domain_gpus(self.question.cluster)
        meshes = sorted(self._meshes(), key=lambda mesh: mesh.split(unit))[:tries]
        for offload in reversed(self.offloads):
            for mesh in meshes:
                _, best = self._tried(mesh, [offload])
                if best is not None and best.fits:
                    return self._eased(best)
            if len(offload) >= len(found.layout.offload):
                break
        return self._eased(found)

    def _eased(self, found: NearestLayout) -> NearestLayout:
        """Return the same split with as little recompute and sharing as it may."""
        zeros, offloads = self.zeros[::-1], [found.layout.offload]
        every = self._kept(_bare(found.layout), zeros, offloads, self.agains[::-1])
        return next((one for one in every if one.fits), found)

    def _tried(
        self, mesh: _Mesh, offloads: list[tuple[Offload, ...]]
    ) -> tuple[DegreeSplit, NearestLayout | None]:
        """Return the best of the smallest microbatch that has a schedule."""
        for core in mesh.cores:
            best = _best(self._plain(core, mesh.spread, offloads))
            if best is not None:
                return core, best
        return mesh.cores[0], None

    def _meshes(self) -> Iterator[_Mesh]:
        cores: dict[tuple[object, ...], list[DegreeSplit]] = {}
        for core in self.meshes.list_splits():
            cores.setdefault((*core[:4], core.precision), []).append(core)
        for some in cores.values():
            some.sort(key=lambda core: core.microbatch)
            for spread in self.meshes.list_expert_splits(some[0]):
                yield _Mesh(self._rough_bytes(some[0], spread), some, spread)

    def _rough_bytes(self, core: DegreeSplit, spread: ExpertParallelSplit) -> float:
        """Estimate a rank's states and activations, to have an order to try splits in."""
        dense = self.dense / (core.tp * core.pp)
        width, replicas = spread.expert_tp or core.tp, core.dp * core.cp
        experts = self.experts / (spread.ep * width * core.pp)
        copies = max(1.0, core.tp * replicas / (spread.ep * width))
        # 16-bit weights, 32-bit gradients and 12 bytes of optimizer states, shared by ZeRO.
        whole = {0: 18.0, 1: 6.0, 2: 2.0, 3: 0.0}[self.zeros[0]]
        states = dense * (whole + (18 - whole) / replicas)
        states += experts * (whole + (18 - whole) / copies)
        question = self.question
        tokens = core.microbatch * question.workload.sequence_length / core.cp / core.tp
        count = question.workload.global_batch // (core.dp * core.microbatch)
        kept = 2 * question.model.hidden * question.model.layers / core.pp * min(core.pp, count)
        # Logits in 32 bits with their gradient lie on the last stage.
        return states + tokens * (kept + 8 * question.model.vocab)

    def _agains(self) -> tuple[RecomputeChoice, ...]:
        """Return what computes most again, and what least, by the bytes that layers keep."""
        counts = {block.name: often for block, often in self.question.model.count_layers_by_block()}
        plain = self.space.base
        every = []
        for again in list_recompute_choices(self.question):
            layers = layer_bytes(
                self.question.build_run(again.apply_to(replace(plain, recompute="none")))
            )
            kept = sum(often * layers[name].with_recompute for name, often in counts.items())
            every.append((kept, again))
        # Of those that keep the same the first computes least again.
        ends = [end(every, key=lambda one: one[0])[1] for end in (min, max)] if every else []
        return tuple(dict.fromkeys(ends))

    def _plain(
        self, core: DegreeSplit, spread: ExpertParallelSplit, offloads: list[tuple[Offload, ...]]
    ) -> Iterator[NearestLayout]:
        """Yield the lightest kind of layout of a split, parameters sharded or not."""
        for layout in self._staged(core, spread, thorough=False):
            yield from self._kept(layout, self.zeros[:2], offloads, self.agains)

    def _thorough(self, core: DegreeSplit, spread: ExpertParallelSplit) -> Iterator[NearestLayout]:
        """Yield every schedule of a split, and the best of them with every way to share."""
        staged = (
            best
            for layout in self._staged(core, spread, thorough=True)
            if (best := _best(self._kept(layout, self.zeros[:2], self.offloads[:1], self.agains)))
        )
        closest = min(staged, key=lambda one: one.needed_bytes, default=None)
        if closest is not None:
            yield closest
            yield from self._kept(_bare(closest.layout), self.zeros, self.offloads, self.agains)

    def _staged(
        self, core: DegreeSplit, spread: ExpertParallelSplit, *, thorough: bool
    ) -> Iterator[Layout]:
        """Yield layouts with their schedule: the lightest one, or all."""
        contexts = self.meshes.list_context_options(core.tp, core.cp)
        # Ranks that gather all keys and values at once hold more of them.
        contexts.sort(key=lambda one: (not one[0], one[1] == "allgather"))
        schedules = self._interleavings(core)
        plain = self.shapes.build_layout(core, spread)
        order = self._order(plain) if contexts and schedules else None
        if order is None:
            return
        split, kind = contexts[0]
        layout = replace(plain, order=order, sequence_parallel=split, cp_kind=kind)
        for schedule, per_rank in schedules if thorough else schedules[:1]:
            chunks = core.pp * per_rank
            if thorough or "stage_layers" in self.space.fixed:
                splits = self.pipes.list_layer_splits(self.question.build_run(layout), chunks)
            else:
                splits = [split_evenly(self.question.model.layers, chunks)]
            for layers in splits:
                even = None if len(set(layers)) == 1 else layers
                yield replace(layout, schedule=schedule, virtual_stages=per_rank, stage_layers=even)

    def _interleavings(self, core: DegreeSplit) -> list[ChunkedSchedule]:
        """Return the schedules of a core, the lightest first, each with as few chunks as it may."""
        count = self.question.workload.global_batch // (core.dp * core.microbatch)
        known = self._schedules.get((core.pp, count))
        if known is None:
            fewest: dict[str, ChunkedSchedule] = {}
            for one in self.meshes.list_schedules(core):
                fewest.setdefault(one.schedule, one)
            known = sorted(fewest.values(), key=lambda one: _LIGHT.index(one.schedule))
            self._schedules[core.pp, count] = known
        return known

    def _order(self, layout: Layout) -> str | None:
        """Return an order of the axes that is allowed; the usual one where it is."""
        usual = Layout().order
        if usual in (self.space.get_allowed("order") or ()) and not self.space.fit_scale_up_domain:
            return usual  # pp is last, so experts lie in the stage of their rank
        return next(iter(list_allowed_orders(self.question, layout)), None)

    def _kept(
        self,
        layout: Layout,
        zeros: Iterable[int],
        offloads: Iterable[tuple[Offload, ...]],
        agains: Iterable[RecomputeChoice],
    ) -> Iterator[NearestLayout]:
        """Yield a layout with ways to share, to offload and to recompute."""
        spread = layout.dp * layout.cp
        if spread == 1:
            zeros = (0,) if 0 in self.zeros else ()
        layers = max(layout.stage_layers or (self.question.model.layers // layout.chunks,))
        covered, away = (
            self._layers(name, layers) for name in ("recompute_layers", "offload_layers")
        )
        for offload, again, zero in product(offloads, agains, zeros):
            shards = self._shards(spread) if zero else [None]
            for shard in shards[:1]:
                whole = replace(
                    layout, zero=zero, shard=shard, offload=offload,
                    offload_layers=away if "activations" in offload else None,
                )  # fmt: skip
                some = None if again.recompute == "none" else covered
                yield self._predicted(again.apply_to(whole, some))

    def _shards(self, spread: int) -> list[int | None]:
        """Return the sizes of a shard, the largest first."""
        allowed = self.space.get_allowed("shard")
        every = [None, *reversed(list_divisors(spread)[1:-1])]
        return [shard for shard in every if allowed is None or shard in allowed]

    def _layers(self, name: str, deepest: int) -> int | None:
        """Return as many layers of a chunk as may be chosen; None for all."""
        given = self.space.get_allowed(name)
        if given is None or None in given:
            return None
        return max((one for one in given if one <= deepest), default=0)

    def _predicted(self, layout: Layout) -> NearestLayout:
        memory = predict_memory(self.question.build_run(layout))
        worst = memory.worst_stage
        return NearestLayout(layout, worst.stage, worst.total_bytes, memory.capacity_bytes)


def _bare(layout: Layout) -> Layout:
    """Return a layout with nothing recomputed or in host memory."""
    return replace(
        layout, recompute="none", recompute_ops=(), recompute_layers=None, offload=(),
        offload_layers=None,
    )  # fmt: skip


def _best(some: Iterable[NearestLayout]) -> NearestLayout | None:
    """Return the first that fits, or else the one that needs least."""
    best: NearestLayout | None = None
    for one in some:
        if one.fits:
            return one
        if best is None or one.needed_bytes < best.needed_bytes:
            best = one
    return best
