"""What a step takes at the least when only its split of the GPUs is known.

Three bounds, each dearer and tighter: kernels with experts at their best; the same with the least
that tensor and context parallelism can cost in any order of the axes; the experts' own kernels and
the least that their exchange can cost.
"""

from collections import Counter

from msgspec.structs import replace

from meshwright.predict.block_comm import BlockComm, block_comm, exchange_s, neighbours, place
from meshwright.predict.block_time import Passes
from meshwright.predict.network import Placement, strided
from meshwright.predict.plan.meshes import Core, Meshes, Spread
from meshwright.predict.plan.orders import orders_of
from meshwright.predict.plan.profiles import Profiles
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.shapes import Key, Layers, Shapes
from meshwright.predict.run import Run
from meshwright.predict.stage_time import Layer
from meshwright.spec.layout import Layout
from meshwright.spec.model import Experts

_ANYWHERE = Spread(1, 1)
_SILENT = BlockComm()
_BEHIND = Passes(0.0, float("inf"), float("inf"))
"""Gradients that hide all communication that they can hide."""


class Bounds:
    """Lower bounds of one question's splits."""

    def __init__(
        self, question: Question, meshes: Meshes, shapes: Shapes, profiles: Profiles
    ) -> None:
        self.question, self.meshes, self.shapes, self.profiles = question, meshes, shapes, profiles
        self._calm: dict[Key, dict[str, float]] = {}
        self._orders: dict[Key, list[str]] = {}
        self._exchange: dict[Key, float] = {}
        self._placed: dict[Key, set[Placement]] = {}

    def kernels_s(self, core: Core) -> float:
        """Return the least that the kernels of a core take, wherever its experts lie."""
        return min(self._least_s(core, None, split) for split in self._splits(core))

    def core_s(self, core: Core, limit_s: float) -> float:
        """Return the same with communication and with what memory forces on it, below a limit."""
        return min(
            self._least_s(core, None, split, comm=True, limit_s=limit_s)
            for split in self._splits(core)
        )

    def mesh_s(self, core: Core, spread: Spread, limit_s: float) -> float:
        """Return the same with its experts in some places."""
        return min(
            self._least_s(core, spread, split, comm=True, limit_s=limit_s)
            for split in self._splits(core)
        )

    def _splits(self, core: Core) -> set[bool]:
        return {split for split, _ in self.meshes.contexts(core.tp, core.cp)}

    def _least_s(
        self,
        core: Core,
        spread: Spread | None,
        split: bool,
        *,
        comm: bool = False,
        limit_s: float = float("inf"),
    ) -> float:
        kernels, model = self.shapes.kernels, self.question.model
        layout = self.shapes.layout(core, spread or _ANYWHERE)
        layout = replace(layout, sequence_parallel=split, zero=3)
        run = self.question.run(layout)
        found = kernels.least if spread is None else kernels.paced
        waits = self._comm(core, split) if comm else {}
        whole = trip = 0.0
        ahead, counts = model.multi_token, Counter(model.layer_names)
        layers: Layers = {}
        for block in model.blocks:
            often = counts[block.name]
            if ahead is not None and ahead.block == block.name:
                often += ahead.depth
            passes = found(run, block)
            wait = waits.get(block.name, 0.0)
            if spread is not None and isinstance(block.mlp, Experts) and spread.ep > 1:
                hidden = run.constants.expert_hidden * (passes.forward + passes.backward)
                wait += max(0.0, 4 * self._experts(run, block.mlp) - hidden)
            passes = passes._replace(input_gradient=passes.input_gradient + wait)
            layers[block.name] = Layer(passes, _SILENT, 0.0)
            whole += often * (passes.forward + passes.backward)
            trip += often * (passes.forward + passes.input_gradient)
        ends = kernels.ends(run)
        for end in ends:
            whole += end.forward + end.backward
            trip += end.forward + end.input_gradient
        even = run.microbatches * whole / core.pp
        least = max(even, trip) if core.pp > 1 else even
        if not comm or least >= limit_s:
            return least
        first, last = (end.forward + end.backward for end in ends)
        if ahead is not None:
            passes = layers[ahead.block].passes
            last += ahead.depth * (passes.forward + passes.backward)
        known = spread is not None
        return max(least, self.profiles.least_s(core, run, layers, (first, last), experts=known))

    def _comm(self, core: Core, split: bool) -> dict[str, float]:
        """Return what each kind of layer waits for tensor and context parallelism at the least."""
        key = (core, split)
        known = self._calm.get(key)
        if known is None:
            known = self._calm[key] = self._waits(core, split)
        return known

    def _waits(self, core: Core, split: bool) -> dict[str, float]:
        plain = self.shapes.layout(core, Spread())
        tensor = split and max(self.question.space.allowed("overlap_tp") or (False,))
        kinds = [kind for one, kind in self.meshes.contexts(core.tp, core.cp) if one == split]
        least: dict[str, tuple[float, float]] = {}
        # Expert layers may do without communication after their experts.
        blocks = [
            replace(block, mlp=None) if isinstance(block.mlp, Experts) else block
            for block in self.question.model.blocks
        ]
        for order in self._distinct(plain):
            for kind in kinds:
                layout = replace(
                    plain, order=order, sequence_parallel=split, cp_kind=kind, overlap_tp=tensor
                )
                run = self.question.run(layout)
                for block in blocks:
                    found = block_comm(run, block, _BEHIND)
                    tp, cp = least.get(block.name, (float("inf"), float("inf")))
                    tp = min(tp, found.tp_forward + found.tp_backward)
                    least[block.name] = tp, min(cp, found.cp_forward + found.cp_backward)
        return {name: sum(both) for name, both in least.items()}

    def _distinct(self, layout: Layout) -> list[str]:
        """Return orders that put tensor and context parallel groups in different places."""
        key = (layout.tp, layout.cp, layout.pp, layout.dp)
        known = self._orders.get(key)
        if known is None:
            found: dict[object, str] = {}
            for order in orders_of(self.question, layout):
                ordered, cluster = replace(layout, order=order), self.question.limited
                groups = place(cluster, ordered, "tp"), place(cluster, ordered, "cp")
                found.setdefault((groups, neighbours(cluster, ordered, "cp")), order)
            known = self._orders[key] = list(found.values())
        return known

    def _experts(self, run: Run, experts: Experts) -> float:
        """Return the least that one exchange between experts takes in any order."""
        layout = run.layout
        key = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp, run.tokens)
        known = self._exchange.get((key, experts))
        if known is None:
            known = min(exchange_s(run, experts, group) for group in self._groups(layout))
            self._exchange[key, experts] = known
        return known

    def _groups(self, layout: Layout) -> set[Placement]:
        """Return every place that a group of experts may have."""
        sizes = {
            "tp": layout.experts_tp,
            "ep": layout.ep,
            "dp": layout.expert_dp,
            "pp": layout.pp,
            "cp": 1,
        }
        key = tuple(sizes.values())
        known = self._placed.get(key)
        if known is None:
            strides = set()
            for order in self.question.space.allowed("order") or ():
                stride = 1
                for axis in order.split("-"):
                    if axis == "ep":
                        break
                    stride *= sizes[axis]
                strides.add(stride)
            known = self._placed[key] = {
                strided(self.question.limited, 0, layout.ep, stride) for stride in strides
            }
        return known
