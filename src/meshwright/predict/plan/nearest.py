"""The layout of a question that needs least memory, whether it fits or not.

Only extremes are tried: the smallest microbatch, the strongest recompute, states shared as widely
and moved to the host as far as allowed. Splits are tried in the order of a rough estimate, and the
best of them are then held against every schedule and every way to share. So the answer is close to
the least and may miss it, but what it says of its layout is the prediction itself. `plainest` looks
for a layout that fits with little of all that.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.memory import layer_bytes, predict_memory
from meshwright.predict.network.placement import unit_gpus
from meshwright.predict.plan.meshes import Core, Interleaving, Meshes, Spread, divisors
from meshwright.predict.plan.orders import orders_of
from meshwright.predict.plan.pipes import Pipes
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Again, choices
from meshwright.predict.plan.shapes import Shapes
from meshwright.predict.plan.splits import light_ends
from meshwright.spec.layout import Layout, Offload
from meshwright.spec.model import count_parameters

_FINALISTS = 3
"""Splits that are held against every schedule and way to share."""
_LIGHT = (
    "1f1b", "zb-h1", "zb-v", "dualpipe-v", "dualpipe", "zb-h2", "interleaved", "gpipe",
)  # fmt: skip
"""Schedules, those with few microbatches in flight first."""


class Nearest(NamedTuple):
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


def nearest(question: Question, *, tries: int) -> Nearest | None:
    """Return a layout that fits, or else the one closest to fitting; None where none is sound.

    `tries` is how many splits of the GPUs, with the places of experts, are looked at.
    """
    return _Extremes(question).least(tries)


def plainest(question: Question, found: Nearest, *, tries: int) -> Nearest:
    """Return a layout that fits as well as a found one and is split less, if there is one."""
    return _Extremes(question).plainer(found, tries)


class _Mesh(NamedTuple):
    """A split of the GPUs with its microbatches, the smallest first."""

    rough_bytes: float
    cores: list[Core]
    spread: Spread

    def split(self, unit: int) -> float:
        """Return how far it splits the model, groups that leave a unit counting more."""
        core = self.cores[0]
        inside = core.tp * core.cp
        width = self.spread.ep * (self.spread.expert_tp or 1)
        return inside * core.cp * core.pp * max(1.0, inside / unit) * sqrt(width)


class _Extremes:
    """Looks for little memory in one space."""

    def __init__(self, question: Question) -> None:
        self.question, self.space = question, question.space
        self.meshes = Meshes(question)
        self.shapes = Shapes(question, self.meshes)
        self.pipes = Pipes(self.meshes, self.shapes.kernels)
        parameters = count_parameters(question.model)
        self.experts = parameters.experts
        self.dense = parameters.total - parameters.experts
        self.zeros = sorted(set(self.space.allowed("zero") or ()), reverse=True)
        self.offloads: list[tuple[Offload, ...]] = sorted(
            set(self.space.allowed("offload") or ()), key=len, reverse=True
        )
        self.agains = self._agains()
        self._schedules: dict[tuple[int, int], list[Interleaving]] = {}

    def least(self, tries: int) -> Nearest | None:
        """Return what comes nearest to fitting, or the first that fits."""
        if not (self.zeros and self.offloads and self.agains):
            return None
        found: list[tuple[Nearest, Core, Spread]] = []
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

    def plainer(self, found: Nearest, tries: int) -> Nearest:
        """Return what fits and splits the model least, with as little in host memory as it may."""
        unit = unit_gpus(self.question.cluster)
        meshes = sorted(self._meshes(), key=lambda mesh: mesh.split(unit))[:tries]
        for offload in reversed(self.offloads):
            for mesh in meshes:
                _, best = self._tried(mesh, [offload])
                if best is not None and best.fits:
                    return self._eased(best)
            if len(offload) >= len(found.layout.offload):
                break
        return self._eased(found)

    def _eased(self, found: Nearest) -> Nearest:
        """Return the same split with as little recompute and sharing as it may."""
        zeros, offloads = self.zeros[::-1], [found.layout.offload]
        every = self._kept(_bare(found.layout), zeros, offloads, self.agains[::-1])
        return next((one for one in every if one.fits), found)

    def _tried(
        self, mesh: _Mesh, offloads: list[tuple[Offload, ...]]
    ) -> tuple[Core, Nearest | None]:
        """Return the best of the smallest microbatch that has a schedule."""
        for core in mesh.cores:
            best = _best(self._plain(core, mesh.spread, offloads))
            if best is not None:
                return core, best
        return mesh.cores[0], None

    def _meshes(self) -> Iterator[_Mesh]:
        cores: dict[tuple[object, ...], list[Core]] = {}
        for core in self.meshes.cores():
            cores.setdefault((*core[:4], core.precision), []).append(core)
        for some in cores.values():
            some.sort(key=lambda core: core.microbatch)
            for spread in self.meshes.spreads(some[0]):
                yield _Mesh(self._rough_bytes(some[0], spread), some, spread)

    def _rough_bytes(self, core: Core, spread: Spread) -> float:
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

    def _agains(self) -> tuple[Again, ...]:
        """Return what computes most again, and what least, by the bytes that layers keep."""
        counts = {block.name: often for block, often in self.question.model.block_counts()}
        plain = self.space.base
        every = []
        for again in choices(self.question):
            layers = layer_bytes(self.question.run(again.on(replace(plain, recompute="none"))))
            kept = sum(often * layers[name].kept for name, often in counts.items())
            every.append((kept, again))
        # Of those that keep the same the first computes least again.
        ends = [end(every, key=lambda one: one[0])[1] for end in (min, max)] if every else []
        return tuple(dict.fromkeys(ends))

    def _plain(
        self, core: Core, spread: Spread, offloads: list[tuple[Offload, ...]]
    ) -> Iterator[Nearest]:
        """Yield the lightest kind of layout of a split, parameters sharded or not."""
        for layout in self._staged(core, spread, thorough=False):
            yield from self._kept(layout, self.zeros[:2], offloads, self.agains)

    def _thorough(self, core: Core, spread: Spread) -> Iterator[Nearest]:
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

    def _staged(self, core: Core, spread: Spread, *, thorough: bool) -> Iterator[Layout]:
        """Yield layouts with their schedule: the lightest one, or all."""
        contexts = self.meshes.contexts(core.tp, core.cp)
        # Ranks that gather all keys and values at once hold more of them.
        contexts.sort(key=lambda one: (not one[0], one[1] == "allgather"))
        schedules = self._interleavings(core)
        plain = self.shapes.layout(core, spread)
        order = self._order(plain) if contexts and schedules else None
        if order is None:
            return
        split, kind = contexts[0]
        layout = replace(plain, order=order, sequence_parallel=split, cp_kind=kind)
        for schedule, per_rank in schedules if thorough else schedules[:1]:
            chunks = core.pp * per_rank
            if thorough or "stage_layers" in self.space.fixed:
                splits = self.pipes.splits(self.question.run(layout), chunks)
            else:
                splits = [light_ends(self.question.model.layers, chunks)]
            for layers in splits:
                even = None if len(set(layers)) == 1 else layers
                yield replace(layout, schedule=schedule, virtual_stages=per_rank, stage_layers=even)

    def _interleavings(self, core: Core) -> list[Interleaving]:
        """Return the schedules of a core, the lightest first, each with as few chunks as it may."""
        count = self.question.workload.global_batch // (core.dp * core.microbatch)
        known = self._schedules.get((core.pp, count))
        if known is None:
            fewest: dict[str, Interleaving] = {}
            for one in self.meshes.interleavings(core):
                fewest.setdefault(one.schedule, one)
            known = sorted(fewest.values(), key=lambda one: _LIGHT.index(one.schedule))
            self._schedules[core.pp, count] = known
        return known

    def _order(self, layout: Layout) -> str | None:
        """Return an order of the axes that is allowed; the usual one where it is."""
        usual = Layout().order
        if usual in (self.space.allowed("order") or ()) and not self.space.must_fit_node:
            return usual  # pp is last, so experts lie in the stage of their rank
        return next(iter(orders_of(self.question, layout)), None)

    def _kept(
        self,
        layout: Layout,
        zeros: Iterable[int],
        offloads: Iterable[tuple[Offload, ...]],
        agains: Iterable[Again],
    ) -> Iterator[Nearest]:
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
                yield self._predicted(again.on(whole, some))

    def _shards(self, spread: int) -> list[int | None]:
        """Return the sizes of a shard, the largest first."""
        allowed = self.space.allowed("shard")
        every = [None, *reversed(divisors(spread)[1:-1])]
        return [shard for shard in every if allowed is None or shard in allowed]

    def _layers(self, name: str, deepest: int) -> int | None:
        """Return as many layers of a chunk as may be chosen; None for all."""
        given = self.space.allowed(name)
        if given is None or None in given:
            return None
        return max((one for one in given if one <= deepest), default=0)

    def _predicted(self, layout: Layout) -> Nearest:
        memory = predict_memory(self.question.run(layout))
        worst = memory.worst
        return Nearest(layout, worst.stage, worst.total_bytes, memory.capacity_bytes)


def _bare(layout: Layout) -> Layout:
    """Return a layout with nothing recomputed or in host memory."""
    return replace(
        layout, recompute="none", recompute_ops=(), recompute_layers=None, offload=(),
        offload_layers=None,
    )  # fmt: skip


def _best(some: Iterable[Nearest]) -> Nearest | None:
    """Return the first that fits, or else the one that needs least."""
    best: Nearest | None = None
    for one in some:
        if one.fits:
            return one
        if best is None or one.needed_bytes < best.needed_bytes:
            best = one
    return best
