"""A shape: everything that decides how long one layer takes on one rank.

Its times are those of `predict.stage_time`, layer by layer and without recompute. Kernels depend on
fewer choices than shapes are made of, and so does communication inside a pass, so both are kept
and used again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.predict.block_comm import BlockComm
from meshwright.predict.block_time import Passes, block_passes
from meshwright.predict.bubble import hop_s
from meshwright.predict.cost import grouped_least_s
from meshwright.predict.plan.meshes import Core, Meshes, Spread
from meshwright.predict.plan.orders import Inside, places
from meshwright.predict.plan.question import Question
from meshwright.predict.run import Run
from meshwright.predict.stage_time import Layer, embedding_passes, head_passes, launched, layer_time
from meshwright.spec.layout import Layout
from meshwright.spec.model import Block, Experts

Layers = dict[str, Layer]
"""One layer of every kind."""
Key = tuple[object, ...]


class Part(NamedTuple):
    """Seconds of one microbatch in a part of the model."""

    forward: float = 0.0
    backward: float = 0.0
    weight_gradient: float = 0.0
    """The share of backward that nobody waits for."""
    experts: float = 0.0
    """Exposed exchange of the experts, both ways."""


class Shape:
    """One choice of degrees, microbatch, context kind, overlap and places, with its layers."""

    def __init__(
        self,
        run: Run,
        orders: tuple[str, ...],
        layers: Layers,
        ends: tuple[Passes, Passes],
        hop_s: float,
    ) -> None:
        self.run, self.orders, self.layers, self.ends, self.hop_s = run, orders, layers, ends, hop_s
        self.layout, self.microbatches = run.layout, run.microbatches
        self.parts = {name: _part(layer) for name, layer in layers.items()}
        """One layer of every kind."""
        self.first, self.last = (
            Part(end.forward, end.backward, end.weight_gradient) for end in ends
        )
        """Embedding; heads with the layers of those that look further ahead."""
        heads = run.model.multi_token
        if heads is not None:
            more = self.parts[heads.block]
            self.last = Part(*(a + heads.depth * b for a, b in zip(self.last, more, strict=True)))
        every = [(self.parts[block.name], often) for block, often in run.model.block_counts()]
        every += [(self.first, 1), (self.last, 1)]
        self.whole_s = sum([often * (part.forward + part.backward) for part, often in every])
        """A microbatch through the whole model and back."""
        self.trip_s = self.whole_s - sum([often * part.weight_gradient for part, often in every])
        """The same where weight gradients can wait."""
        self.exchange_s = sum([often * part.experts for part, often in every])
        """What of it the experts' exchange takes."""
        self.options: dict[tuple[bool, bool], Any] = {}

    def least_s(self) -> float:
        """Return the least a step takes: passes spread evenly, or one microbatch there and back.

        Passes side by side may hide the experts' exchange, where no switch does.
        """
        hidden = 0.0
        if self.exchange_s and not self.layout.overlap_ep:
            compute = self.whole_s - self.exchange_s
            hidden = min(self.exchange_s, self.run.constants.expert_hidden * compute)
        even = self.microbatches * (self.whole_s - hidden) / self.layout.pp
        return max(even, self.trip_s - hidden) if self.layout.pp > 1 else even


def _part(layer: Layer) -> Part:
    passes, comm = layer.passes, layer.comm
    return Part(
        passes.forward + comm.forward,
        passes.backward + comm.backward,
        passes.weight_gradient,
        comm.ep_forward + comm.ep_backward,
    )


def quickest(shapes: list[Shape]) -> Shape:
    """Return a shape that is nowhere slower than some that differ in communication only."""
    first = shapes[0]
    if len(shapes) == 1:
        return first
    layers = {name: _quicker([shape.layers[name] for shape in shapes]) for name in first.layers}
    run = first.run
    if run.layout.overlap_ep and not all(shape.layout.overlap_ep for shape in shapes):
        run = next(shape.run for shape in shapes if not shape.layout.overlap_ep)
    hop_s = min(shape.hop_s for shape in shapes)
    orders = dict.fromkeys(order for shape in shapes for order in shape.orders)
    return Shape(run, tuple(orders), layers, first.ends, hop_s)


def _quicker(layers: list[Layer]) -> Layer:
    """Return a layer that is in nothing slower than any of some."""
    passes = Passes(*map(min, zip(*(one.passes for one in layers), strict=True)))
    comm = BlockComm(*map(min, zip(*(one.comm for one in layers), strict=True)))
    return Layer(passes, comm, min(one.recompute for one in layers))


class Kernels:
    """Times of layers, kept by what they depend on."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._blocks: dict[Key, Passes] = {}
        self._layers: dict[Key, Layers] = {}
        self._ends: dict[Key, tuple[Passes, Passes]] = {}
        self._numbers: dict[Inside, int] = {}

    def key(self, run: Run) -> Key:
        """Return what the kernels of dense layers depend on."""
        layout = run.layout
        # Where no product sums gradients up on its way, that is a kernel of its own.
        summed = not run.software.fused_accumulation
        return (
            layout.tp, layout.cp, layout.microbatch, layout.sequence_parallel, layout.precision,
            summed and layout.zero == 3, summed and run.microbatches == 1,
        )  # fmt: skip

    def passes(self, run: Run, block: Block) -> Passes:
        """Return the kernels of one block."""
        key = (block.name, *self.key(run))
        if isinstance(block.mlp, Experts):
            key += (run.layout.ep, run.layout.expert_tp)
        known = self._blocks.get(key)
        if known is None:
            known = self._blocks[key] = block_passes(run, block)
        return known

    def least(self, run: Run, block: Block) -> Passes:
        """Return what the kernels of a block take at the least, wherever its experts lie."""
        if not isinstance(block.mlp, Experts):
            return self._paced(run, block, self.passes(run, block))
        key = ("least", block.name, *self.key(run))
        known = self._blocks.get(key)
        if known is None:
            forward, gradient = self.least_experts(run, block.mlp)
            known = Passes()
            if block.mixer is not None:
                known = block_passes(run, replace(block, mlp=None))
            weights = 0.0 if run.frozen else gradient
            known = self._paced(run, block, known + Passes(forward, gradient, weights))
            self._blocks[key] = known
        return known

    @staticmethod
    def least_experts(run: Run, experts: Experts) -> tuple[float, float]:
        """Return what the products of experts and each of their gradients take at the least."""
        inner = (3 if experts.gated else 2) * experts.width
        rows = run.tokens * experts.top_k / run.layout.tp
        flops = 2.0 * rows * (experts.latent or run.model.hidden) * inner
        forward, gradient = (
            grouped_least_s(run.costs, flops, precision=run.layout.precision, gradient=back)
            for back in (False, True)
        )
        return forward, gradient

    def paced(self, run: Run, block: Block) -> Passes:
        """Return the kernels of a block at the host's pace."""
        return self._paced(run, block, self.passes(run, block))

    @staticmethod
    def _paced(run: Run, block: Block, passes: Passes) -> Passes:
        return passes if run.software.graphs else launched(run, block, passes)

    def number(self, inside: Inside) -> int:
        """Return the number of some places: hashing them each time takes long."""
        return self._numbers.setdefault(inside, len(self._numbers))

    def layers(self, run: Run, inside: int) -> Layers:
        """Return one layer of every kind with its communication.

        `inside` numbers the places of the groups that talk in it.
        """
        layout = run.layout
        key = (
            *self.key(run), layout.ep, layout.expert_tp, layout.cp_kind, layout.overlap_tp,
            layout.overlap_ep, inside,
        )  # fmt: skip
        known = self._layers.get(key)
        if known is None:
            known = self._layers[key] = {
                block.name: layer_time(run, block, self.passes(run, block))
                for block in run.model.blocks
            }
        return known

    def ends(self, run: Run) -> tuple[Passes, Passes]:
        """Return embedding and heads."""
        layout = run.layout
        key = (layout.tp, layout.cp, layout.microbatch)
        known = self._ends.get(key)
        if known is None:
            known = self._ends[key] = embedding_passes(run), head_passes(run)
        return known


class Shapes:
    """The shapes of one question."""

    def __init__(self, question: Question, meshes: Meshes) -> None:
        self.question, self.meshes = question, meshes
        self.kernels = Kernels(question)
        self._places: dict[Key, list[tuple[int, tuple[str, ...]]]] = {}

    def layout(self, core: Core, spread: Spread) -> Layout:
        """Return a layout with the degrees of a core, all else as the question's own."""
        return replace(
            self.question.space.base,
            tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, microbatch=core.microbatch,
            precision=core.precision, ep=spread.ep, expert_tp=spread.expert_tp,
            sequence_parallel=False, virtual_stages=1, schedule="1f1b", stage_layers=None,
            shard=None, zero=0, recompute="none", recompute_ops=(), recompute_layers=None,
            offload=(), offload_layers=None,
        )  # fmt: skip

    def of(self, layout: Layout, kinds: list[str]) -> Iterator[Shape]:
        """Yield every shape with the degrees of a layout and some kinds of context parallelism."""
        for inside, orders in self._orders(layout):
            for kind in kinds:
                # Products split for overlap never take longer, so waiting is only for who must.
                tensor = max(self._switch("overlap_tp", layout.sequence_parallel))
                for experts in self._switch("overlap_ep", layout.ep > 1):
                    run = self.question.run(
                        replace(
                            layout,
                            order=orders[0],
                            cp_kind=kind,
                            overlap_tp=tensor,
                            overlap_ep=experts,
                        )
                    )
                    ends, layers = self.kernels.ends(run), self._layers(run, inside)
                    yield Shape(run, orders, layers, ends, hop_s(run))

    def _layers(self, run: Run, inside: int) -> Layers:
        """Return the least that layers take, gradients summed up by kernels of their own or not."""
        zeros = self.question.space.allowed("zero") or ()
        layers = self.kernels.layers(run, inside)
        if self.question.software.fused_accumulation or 3 not in zeros:
            return layers
        sharded = self.kernels.layers(self.question.run(replace(run.layout, zero=3)), inside)
        return {name: _quicker([layer, sharded[name]]) for name, layer in layers.items()}

    def _switch(self, name: str, applies: bool) -> tuple[bool, ...]:
        """Return the values of a switch worth a try: off where it has no effect."""
        if not applies:
            return (False,)
        return self.question.space.allowed(name) or ()

    def _orders(self, layout: Layout) -> list[tuple[int, tuple[str, ...]]]:
        """Return groups of orders, each with the number of its places inside a layer."""
        key = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp)
        known = self._places.get(key)
        if known is None:
            known = self._places[key] = [
                (self.kernels.number(inside), orders)
                for (inside, _), orders in places(self.question, layout).items()
            ]
        return known
