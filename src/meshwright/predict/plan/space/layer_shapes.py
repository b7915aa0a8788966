"""A shape: everything that decides how long one layer takes on one rank.

Its times are those of `predict.step.stage_time`, layer by layer and without recompute. Kernels
depend on fewer choices than shapes are made of, and so does communication inside a pass, so both
are kept and used again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.predict.cost import grouped_gemm_bound_s
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.axis_orders import GroupPlacements, list_distinct_orders
from meshwright.predict.plan.space.degree_splits import (
    DegreeSplit,
    DegreeSplits,
    ExpertParallelSplit,
)
from meshwright.predict.step.block_comm import BlockComm
from meshwright.predict.step.block_time import PassTimes, block_passes
from meshwright.predict.step.pipeline_bubble import mean_transfer_s
from meshwright.predict.step.stage_time import (
    LayerTime,
    add_launch_overhead,
    embedding_passes,
    head_passes,
    layer_time,
)
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout
from meshwright.spec.model import BlockSpec, MoESpec

Layers = dict[str, LayerTime]
"""One layer of every kind."""
Key = tuple[object, ...]


class PartTimes(NamedTuple):
    """Seconds of one microbatch in a part of the model."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    wgrad_s: float = 0.0
    """The share of backward that nobody waits for."""
    expert_comm_s: float = 0.0
    """Exposed exchange of the experts, both ways."""


class LayerShape:
    """One choice of degrees, microbatch, context kind, overlap and places, with its layers."""

    def __init__(
        self,
        run: TrainingRun,
        orders: tuple[str, ...],
        layers: Layers,
        end_layers: tuple[PassTimes, PassTimes],
        hop_s: float,
    ) -> None:
        self.run, self.orders, self.layers, self.end_layers, self.hop_s = (
            run,
            orders,
            layers,
            end_layers,
            hop_s,
        )
        self.layout, self.microbatches = run.layout, run.num_microbatches
        self.part_times = {name: _part(layer) for name, layer in layers.items()}
        """One layer of every kind."""
        self.first, self.last = (
            PartTimes(end.forward_s, end.backward_s, end.wgrad_s) for end in end_layers
        )
        """Embedding; heads with the layers of those that look further ahead."""
        heads = run.model.multi_token
        if heads is not None:
            more = self.part_times[heads.block]
            self.last = PartTimes(
                *(a + heads.depth * b for a, b in zip(self.last, more, strict=True))
            )
        every = [
            (self.part_times[block.name], often)
            for block, often in run.model.count_layers_by_block()
        ]
        every += [(self.first, 1), (self.last, 1)]
        self.total_s = sum([often * (part.forward_s + part.backward_s) for part, often in every])
        """A microbatch through the whole model and back."""
        self.round_trip_s = self.total_s - sum([often * part.wgrad_s for part, often in every])
        """The same where weight gradients can wait."""
        self.expert_comm_s = sum([often * part.expert_comm_s for part, often in every])
        """What of it the experts' exchange takes."""
        self.recompute_options: dict[tuple[bool, bool], Any] = {}

    def bound_s(self) -> float:
        """Return the least a step takes: passes spread evenly, or one microbatch there and back.

        Passes side by side may hide the experts' exchange, where no switch does.
        """
        hidden = 0.0
        if self.expert_comm_s and not self.layout.overlap_ep:
            compute = self.total_s - self.expert_comm_s
            hidden = min(self.expert_comm_s, self.run.constants.expert_overlap_share * compute)
        even = self.microbatches * (self.total_s - hidden) / self.layout.pp
        return max(even, self.round_trip_s - hidden) if self.layout.pp > 1 else even


def _part(layer: LayerTime) -> PartTimes:
    passes, comm = layer.passes, layer.comm
    return PartTimes(
        passes.forward_s + comm.forward_s,
        passes.backward_s + comm.backward_s,
        passes.wgrad_s,
        comm.ep_forward_s + comm.ep_backward_s,
    )


def find_fastest_shape(shapes: list[LayerShape]) -> LayerShape:
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
    return LayerShape(run, tuple(orders), layers, first.end_layers, hop_s)


def _quicker(layers: list[LayerTime]) -> LayerTime:
    """Return a layer that is in nothing slower than any of some."""
    passes = PassTimes(*map(min, zip(*(one.passes for one in layers), strict=True)))
    comm = BlockComm(*map(min, zip(*(one.comm for one in layers), strict=True)))
    return LayerTime(passes, comm, min(one.recompute_s for one in layers))


class KernelTimeCache:
    """Times of layers, kept by what they depend on."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question = question
        self._blocks: dict[Key, PassTimes] = {}
        self._layers: dict[Key, Layers] = {}
        self._ends: dict[Key, tuple[PassTimes, PassTimes]] = {}
        self._numbers: dict[GroupPlacements, int] = {}

    def get_dense_kernel_key(self, run: TrainingRun) -> Key:
        """Return what the kernels of dense layers depend on."""
        layout = run.layout
        # Where no product sums gradients up on its way, that is a kernel of its own.
        summed = not run.framework.fused_accumulation
        return (
            layout.tp, layout.cp, layout.microbatch, layout.sequence_parallel, layout.precision,
            summed and layout.zero == 3, summed and run.num_microbatches == 1,
        )  # fmt: skip

    def get_block_passes(self, run: TrainingRun, block: BlockSpec) -> PassTimes:
        """Return the kernels of one block."""
        key = (block.name, *self.get_dense_kernel_key(run))
        if isinstance(block.mlp, MoESpec):
            key += (run.layout.ep, run.layout.expert_tp)
        known = self._blocks.get(key)
        if known is None:
            known = self._blocks[key] = block_passes(run, block)
        return known

    def bound_block(self, run: TrainingRun, block: BlockSpec) -> PassTimes:
        """Return what the kernels of a block take at the least, wherever its experts lie."""
        if not isinstance(block.mlp, MoESpec):
            return self._paced(run, block, self.get_block_passes(run, block))
        key = ("least", block.name, *self.get_dense_kernel_key(run))
        known = self._blocks.get(key)
        if known is None:
            forward, gradient = self.bound_experts(run, block.mlp)
            known = PassTimes()
            if block.mixer is not None:
                known = block_passes(run, replace(block, mlp=None))
            weights = 0.0 if run.frozen else gradient
            known = self._paced(run, block, known + PassTimes(forward, gradient, weights))
            self._blocks[key] = known
        return known

    @staticmethod
    def bound_experts(run: TrainingRun, experts: MoESpec) -> tuple[float, float]:
        """Return what the products of experts and each of their gradients take at the least."""
        inner = (3 if experts.gated else 2) * experts.width
        rows = run.microbatch_tokens * experts.top_k / run.layout.tp
        flops = 2.0 * rows * (experts.latent or run.model.hidden) * inner
        forward, gradient = (
            grouped_gemm_bound_s(
                run.device_costs, flops, precision=run.layout.precision, gradient=back
            )
            for back in (False, True)
        )
        return forward, gradient

    def get_launch_bound_passes(self, run: TrainingRun, block: BlockSpec) -> PassTimes:
        """Return the kernels of a block at the host's pace."""
        return self._paced(run, block, self.get_block_passes(run, block))

    @staticmethod
    def _paced(run: TrainingRun, block: BlockSpec, passes: PassTimes) -> PassTimes:
        return passes if run.framework.cuda_graphs else add_launch_overhead(run, block, passes)

    def intern_placements(self, inside: GroupPlacements) -> int:
        """Return the number of some places: hashing them each time takes long."""
        return self._numbers.setdefault(inside, len(self._numbers))

    def get_layer_times(self, run: TrainingRun, inside: int) -> Layers:
        """Return one layer of every kind with its communication.

        `inside` numbers the places of the groups that talk in it.
        """
        layout = run.layout
        key = (
            *self.get_dense_kernel_key(run),
            layout.ep,
            layout.expert_tp,
            layout.cp_kind,
            layout.overlap_tp,
            layout.overlap_ep,
            inside,
        )
        known = self._layers.get(key)
        if known is None:
            known = self._layers[key] = {
                block.name: layer_time(run, block, self.get_block_passes(run, block))
                for block in run.model.blocks
            }
        return known

    def get_end_layers(self, run: TrainingRun) -> tuple[PassTimes, PassTimes]:
        """Return embedding and heads."""
        layout = run.layout
        key = (layout.tp, layout.cp, layout.microbatch)
        known = self._ends.get(key)
        if known is None:
            known = self._ends[key] = embedding_passes(run), head_passes(run)
        return known


class LayerShapes:
    """The shapes of one question."""

    def __init__(self, question: PlanQuestion, degree_splits: DegreeSplits) -> None:
        self.question, self.degree_splits = question, degree_splits
        self.kernel_times = KernelTimeCache(question)
        self._places: dict[Key, list[tuple[int, tuple[str, ...]]]] = {}

    def build_layout(self, core: DegreeSplit, spread: ExpertParallelSplit) -> Layout:
        """Return a layout with the degrees of a core, all else as the question's own."""
        return replace(
            self.question.space.base,
            tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, microbatch=core.microbatch,
            precision=core.precision, ep=spread.ep, expert_tp=spread.expert_tp,
            sequence_parallel=False, virtual_stages=1, schedule="1f1b", stage_layers=None,
            shard=None, zero=0, recompute="none", recompute_ops=(), recompute_layers=None,
            offload=(), offload_layers=None,
        )  # fmt: skip

    def list_shapes(self, layout: Layout, kinds: list[str]) -> Iterator[LayerShape]:
        """Yield every shape with the degrees of a layout and some kinds of context parallelism."""
        for inside, orders in self._orders(layout):
            for kind in kinds:
                # Products split for overlap never take longer, so waiting is only for who must.
                tensor = max(self._switch("overlap_tp", layout.sequence_parallel))
                for experts in self._switch("overlap_ep", layout.ep > 1):
                    run = self.question.build_run(
                        replace(
                            layout,
                            order=orders[0],
                            cp_kind=kind,
                            overlap_tp=tensor,
                            overlap_ep=experts,
                        )
                    )
                    ends, layers = self.kernel_times.get_end_layers(run), self._layers(run, inside)
                    yield LayerShape(run, orders, layers, ends, mean_transfer_s(run))

    def _layers(self, run: TrainingRun, inside: int) -> Layers:
        """Return the least that layers take, gradients summed up by kernels of their own or not."""
        zeros = self.question.space.get_allowed("zero") or ()
        layers = self.kernel_times.get_layer_times(run, inside)
        if self.question.framework.fused_accumulation or 3 not in zeros:
            return layers
        sharded = self.kernel_times.get_layer_times(
            self.question.build_run(replace(run.layout, zero=3)), inside
        )
        return {name: _quicker([layer, sharded[name]]) for name, layer in layers.items()}

    def _switch(self, name: str, applies: bool) -> tuple[bool, ...]:
        """Return the values of a switch worth a try: off where it has no effect."""
        if not applies:
            return (False,)
        return self.question.space.get_allowed(name) or ()

    def _orders(self, layout: Layout) -> list[tuple[int, tuple[str, ...]]]:
        """Return groups of orders, each with the number of its places inside a layer."""
        key = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp)
        known = self._places.get(key)
        if known is None:
            known = self._places[key] = [
                (self.kernel_times.intern_placements(inside), orders)
                for (inside, _), orders in list_distinct_orders(self.question, layout).items()
            ]
        return known
