"""Time of one microbatch in one chunk of a pipeline: blocks, embedding, head, recompute."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.predict.cost import bytes_moved, linear_s, memory_s
from meshwright.predict.step.block_comm import BlockComm, predict_block_comm
from meshwright.predict.step.block_time import KernelTimes, PassTimes, block_passes, sum_passes
from meshwright.predict.step.recompute_time import recompute_s
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import ModelChunk, list_chunks
from meshwright.spec.model import BlockSpec, MoESpec


class StageTime(NamedTuple):
    """Seconds of one microbatch on one rank, by what they are spent on."""

    forward_s: float
    """The whole forward pass, waiting included."""
    backward_s: float
    """The whole backward pass, recompute and waiting included."""
    wgrad_s: float
    """The part of backward that nobody waits for."""
    compute_s: float
    recompute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    split_penalty_s: float = 0.0
    """How much longer backward takes in two parts than in one."""

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


class ChunkTime(NamedTuple):
    """Seconds of one microbatch in one chunk, and what its forward pass waits for."""

    total: StageTime
    tp_forward_s: float
    cp_forward_s: float
    ep_forward_s: float


class LayerTime(NamedTuple):
    """Seconds of one microbatch in one layer."""

    passes: PassTimes
    """Its kernels, and the host's pace where that is slower."""
    comm: BlockComm
    """Communication that does not hide."""
    recompute_s: float
    """Forward work that its backward does a second time."""


def chunk_times(
    run: TrainingRun, layers: dict[str, LayerTime] | None = None
) -> tuple[ChunkTime, ...]:
    """Return the time of a microbatch in every chunk, in the order a token meets them.

    `layers` gives one layer of every kind where they are known already.
    """
    if layers is None:
        layers = layer_times(run)
    by_position = {chunk.position: chunk for chunk in list_chunks(run.layout, run.model.layers)}
    names, known = run.model.layer_names, dict[tuple[object, ...], ChunkTime]()
    found = []
    for chunk in by_position.values():
        # Most chunks of a model are alike.
        key = (names[chunk.first : chunk.last], chunk.has_embedding, chunk.has_head)
        if key not in known:
            known[key] = _chunk(run, chunk, layers)
        found.append(known[key])
    return tuple(found)


def _chunk(run: TrainingRun, chunk: ModelChunk, layers: dict[str, LayerTime]) -> ChunkTime:
    names = run.model.layer_names[chunk.first : chunk.last]
    used = [(layer, names.count(name)) for name, layer in layers.items() if name in names]
    ends, heads = transfer_passes(run, chunk), run.model.multi_token
    if chunk.has_embedding:
        ends += embedding_passes(run)
    if chunk.has_head:
        ends += head_passes(run)
        if heads is not None:
            used.append((layers[heads.block], heads.depth))
    covered, count = run.layout.recompute_layers, sum(often for _, often in used)
    share = 1.0 if covered is None or not used else min(1.0, covered / count)
    return _sum(ends, used, share)


def _sum(ends: PassTimes, used: list[tuple[LayerTime, int]], recomputed: float) -> ChunkTime:
    """Add up embedding, head and layers, so many of each kind, some of them computed again."""
    passes, comm = ends, BlockComm()
    recompute = 0.0
    for layer, often in used:
        forward, inputs, weights, _, split = layer.passes
        passes += PassTimes(often * forward, often * inputs, often * weights, 0, often * split)
        comm = BlockComm(*(a + often * b for a, b in zip(comm, layer.comm, strict=True)))
        recompute += often * recomputed * layer.recompute_s
    whole = StageTime(
        forward_s=passes.forward_s + comm.forward_s,
        backward_s=passes.backward_s + recompute + comm.backward_s,
        wgrad_s=passes.wgrad_s,
        compute_s=passes.forward_s + passes.backward_s,
        recompute_s=recompute,
        tp_s=comm.tp_forward_s + comm.tp_backward_s,
        cp_s=comm.cp_forward_s + comm.cp_backward_s,
        ep_s=comm.ep_forward_s + comm.ep_backward_s,
        split_penalty_s=passes.split_penalty_s,
    )
    return ChunkTime(whole, comm.tp_forward_s, comm.cp_forward_s, comm.ep_forward_s)


def layer_times(run: TrainingRun) -> dict[str, LayerTime]:
    """Return one layer of every kind."""
    if run.measured is not None:
        return {
            name: LayerTime(part.pass_times, part.comm, part.recompute_s)
            for name, part in run.measured.blocks.items()
        }
    return {
        block.name: layer_time(run, block, block_passes(run, block)) for block in run.model.blocks
    }


def layer_time(run: TrainingRun, block: BlockSpec, passes: PassTimes) -> LayerTime:
    """Return one layer of a block whose kernels take `passes`."""
    comm = predict_block_comm(run, block, passes)
    if not run.framework.cuda_graphs:
        passes = add_launch_overhead(run, block, passes)
    return LayerTime(passes, comm, recompute_s(run, block, passes, comm))


def add_launch_overhead(run: TrainingRun, block: BlockSpec, passes: PassTimes) -> PassTimes:
    """Return a block's passes with the host's pace where kernels are short."""
    forward_s, backward_s = _host_pace(run, block, passes.kernels)
    late = max(0.0, forward_s - passes.forward_s)
    late_back = max(0.0, backward_s - passes.backward_s)
    return passes._replace(forward_s=passes.forward_s + late, dgrad_s=passes.dgrad_s + late_back)


def _host_pace(run: TrainingRun, block: BlockSpec, kernels: int) -> tuple[float, float]:
    """Return what the host takes to launch both passes of a block: as measured, else counted."""
    launch, routed = run.device_costs.launch, isinstance(block.mlp, MoESpec)
    forward_s, backward_s = launch.layer_s, launch.layer_backward_s
    if routed:
        forward_s, backward_s = launch.experts_s, launch.experts_backward_s
    if run.is_calibrated_framework and forward_s is not None and backward_s is not None:
        return forward_s, backward_s
    host_s = kernels * launch.host_s + (run.constants.expert_host_s if routed else 0.0)
    return host_s, 2 * host_s


def transfer_passes(run: TrainingRun, chunk: ModelChunk) -> PassTimes:
    """Return what the messages to and from a chunk take from its rank, where that is known.

    A pass has one message on each side of its chunk but the model's ends; that two chunks of a rank
    may lie side by side is left out.
    """
    if run.measured is None or run.layout.pp == 1:
        return PassTimes()
    sides = 2 - chunk.has_embedding - chunk.has_head
    each = run.measured.stage_transfer_cpu.predict_s(stage_transfer_bytes(run))
    return PassTimes(sides * each, sides * each)


def stage_transfer_bytes(run: TrainingRun) -> float:
    """Return what one rank sends to the next stage per microbatch and chunk."""
    return run.element_bytes * run.local_tokens * run.model.hidden


VOCAB_MULTIPLE = 128
"""What Megatron pads a rank's rows of the vocabulary to."""


def embedding_passes(run: TrainingRun) -> PassTimes:
    """Return the time of the embedding: rows copied out, and their gradients back in."""
    if run.measured is not None:
        return run.measured.embedding.pass_times_with_comm
    moved = memory_s(run.device_costs, "copy", 4.0 * run.microbatch_tokens * run.model.hidden)
    return PassTimes(moved, moved)


def head_passes(run: TrainingRun) -> PassTimes:
    """Return the time of all output heads, without the layers of those that look further ahead."""
    if run.measured is not None:
        return run.measured.head.pass_times_with_comm
    return sum_passes(list_head_kernels(run))


def list_head_kernels(run: TrainingRun) -> Iterator[KernelTimes]:
    """List the products of all output heads in bf16, and the loss over their logits."""
    costs, tokens, hidden = run.device_costs, run.microbatch_tokens, run.model.hidden
    heads = run.model.multi_token
    # Trainers pad the vocabulary, so that each rank's share makes whole tiles.
    rows = VOCAB_MULTIPLE * -(-run.model.vocab // (VOCAB_MULTIPLE * run.layout.tp))
    logits = float(tokens * rows)
    weight = 0.0
    if not run.frozen:
        weight = linear_s(costs, tokens, rows, hidden, "bf16", part="weight_gradient")
    products = PassTimes(
        linear_s(costs, tokens, rows, hidden, "bf16"),
        linear_s(costs, tokens, rows, hidden, "bf16", part="input_gradient"),
        weight,
        1,
    )
    if run.framework.loss_in_place:
        loss = PassTimes(memory_s(costs, "loss_in_place", 2 * 2.0 * logits), 0.0, 0.0, 1)
    else:
        # Over fp32 logits.
        forward, backward = (
            memory_s(costs, op, bytes_moved(op, logits, 4.0))
            for op in ("cross_entropy", "cross_entropy_backward")
        )
        loss = PassTimes(forward, backward, 0.0, 2)
    for _ in range(1 + (heads.depth if heads is not None else 0)):
        yield "head", products
        yield "loss", loss
