"""Time of one microbatch in one chunk of a pipeline: blocks, embedding, head, recompute."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.predict.block_comm import BlockComm, block_comm
from meshwright.predict.block_time import Part, Passes, block_passes, total
from meshwright.predict.cost import bytes_moved, linear_s, memory_s
from meshwright.predict.recompute_time import recompute_s
from meshwright.predict.run import Run
from meshwright.spec.layout import Chunk, chunks
from meshwright.spec.model import Block, Experts


class StageTime(NamedTuple):
    """Seconds of one microbatch on one rank, by what they are spent on."""

    forward: float
    """The whole forward pass, waiting included."""
    backward: float
    """The whole backward pass, recompute and waiting included."""
    weight_gradient: float
    """The part of backward that nobody waits for."""
    compute: float
    recompute: float
    tp: float
    cp: float
    ep: float
    split: float = 0.0
    """How much longer backward takes in two parts than in one."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class ChunkTime(NamedTuple):
    """Seconds of one microbatch in one chunk, and what its forward pass waits for."""

    whole: StageTime
    tp_forward: float
    cp_forward: float
    ep_forward: float


class Layer(NamedTuple):
    """Seconds of one microbatch in one layer."""

    passes: Passes
    """Its kernels, and the host's pace where that is slower."""
    comm: BlockComm
    """Communication that does not hide."""
    recompute: float
    """Forward work that its backward does a second time."""


def chunk_times(run: Run, layers: dict[str, Layer] | None = None) -> tuple[ChunkTime, ...]:
    """Return the time of a microbatch in every chunk, in the order a token meets them.

    `layers` gives one layer of every kind where they are known already.
    """
    if layers is None:
        layers = layer_times(run)
    by_position = {chunk.position: chunk for chunk in chunks(run.layout, run.model.layers)}
    names, known = run.model.layer_names, dict[tuple[object, ...], ChunkTime]()
    found = []
    for chunk in by_position.values():
        # Most chunks of a model are alike.
        key = (names[chunk.first : chunk.last], chunk.has_embedding, chunk.has_head)
        if key not in known:
            known[key] = _chunk(run, chunk, layers)
        found.append(known[key])
    return tuple(found)


def _chunk(run: Run, chunk: Chunk, layers: dict[str, Layer]) -> ChunkTime:
    names = run.model.layer_names[chunk.first : chunk.last]
    used = [(layer, names.count(name)) for name, layer in layers.items() if name in names]
    ends, heads = message_passes(run, chunk), run.model.multi_token
    if chunk.has_embedding:
        ends += embedding_passes(run)
    if chunk.has_head:
        ends += head_passes(run)
        if heads is not None:
            used.append((layers[heads.block], heads.depth))
    covered, count = run.layout.recompute_layers, sum(often for _, often in used)
    share = 1.0 if covered is None or not used else min(1.0, covered / count)
    return _sum(ends, used, share)


def _sum(ends: Passes, used: list[tuple[Layer, int]], recomputed: float) -> ChunkTime:
    """Add up embedding, head and layers, so many of each kind, some of them computed again."""
    passes, comm = ends, BlockComm()
    recompute = 0.0
    for layer, often in used:
        forward, inputs, weights, _, split = layer.passes
        passes += Passes(often * forward, often * inputs, often * weights, 0, often * split)
        comm = BlockComm(*(a + often * b for a, b in zip(comm, layer.comm, strict=True)))
        recompute += often * recomputed * layer.recompute
    whole = StageTime(
        forward=passes.forward + comm.forward,
        backward=passes.backward + recompute + comm.backward,
        weight_gradient=passes.weight_gradient,
        compute=passes.forward + passes.backward,
        recompute=recompute,
        tp=comm.tp_forward + comm.tp_backward,
        cp=comm.cp_forward + comm.cp_backward,
        ep=comm.ep_forward + comm.ep_backward,
        split=passes.split,
    )
    return ChunkTime(whole, comm.tp_forward, comm.cp_forward, comm.ep_forward)


def layer_times(run: Run) -> dict[str, Layer]:
    """Return one layer of every kind."""
    if run.measured is not None:
        return {
            name: Layer(part.passes, part.comm, part.recompute_s)
            for name, part in run.measured.blocks.items()
        }
    return {
        block.name: layer_time(run, block, block_passes(run, block)) for block in run.model.blocks
    }


def layer_time(run: Run, block: Block, passes: Passes) -> Layer:
    """Return one layer of a block whose kernels take `passes`."""
    comm = block_comm(run, block, passes)
    if not run.software.graphs:
        passes = launched(run, block, passes)
    return Layer(passes, comm, recompute_s(run, block, passes, comm))


def launched(run: Run, block: Block, passes: Passes) -> Passes:
    """Return a block's passes with the host's pace where kernels are short."""
    forward_s, backward_s = _host_pace(run, block, passes.kernels)
    late = max(0.0, forward_s - passes.forward)
    late_back = max(0.0, backward_s - passes.backward)
    return passes._replace(
        forward=passes.forward + late, input_gradient=passes.input_gradient + late_back
    )


def _host_pace(run: Run, block: Block, kernels: int) -> tuple[float, float]:
    """Return what the host takes to launch both passes of a block: as measured, else counted."""
    launch, routed = run.costs.launch, isinstance(block.mlp, Experts)
    forward_s, backward_s = launch.layer_s, launch.layer_backward_s
    if routed:
        forward_s, backward_s = launch.experts_s, launch.experts_backward_s
    if run.measured_software and forward_s is not None and backward_s is not None:
        return forward_s, backward_s
    host_s = kernels * launch.host_s + (run.constants.expert_host_s if routed else 0.0)
    return host_s, 2 * host_s


def message_passes(run: Run, chunk: Chunk) -> Passes:
    """Return what the messages to and from a chunk take from its rank, where that is known.

    A pass has one message on each side of its chunk but the model's ends; that two chunks of a rank
    may lie side by side is left out.
    """
    if run.measured is None or run.layout.pp == 1:
        return Passes()
    sides = 2 - chunk.has_embedding - chunk.has_head
    each = run.measured.message_cpu.seconds(sent_bytes(run))
    return Passes(sides * each, sides * each)


def sent_bytes(run: Run) -> float:
    """Return what one rank sends to the next stage per microbatch and chunk."""
    return run.number_bytes * run.local_tokens * run.model.hidden


VOCAB_MULTIPLE = 128
"""What Megatron pads a rank's rows of the vocabulary to."""


def embedding_passes(run: Run) -> Passes:
    """Return the time of the embedding: rows copied out, and their gradients back in."""
    if run.measured is not None:
        return run.measured.embedding.passes_with_comm
    moved = memory_s(run.costs, "copy", 4.0 * run.tokens * run.model.hidden)
    return Passes(moved, moved)


def head_passes(run: Run) -> Passes:
    """Return the time of all output heads, without the layers of those that look further ahead."""
    if run.measured is not None:
        return run.measured.head.passes_with_comm
    return total(head_parts(run))


def head_parts(run: Run) -> Iterator[Part]:
    """List the products of all output heads in bf16, and the loss over their logits."""
    costs, tokens, hidden = run.costs, run.tokens, run.model.hidden
    heads = run.model.multi_token
    # Trainers pad the vocabulary, so that each rank's share makes whole tiles.
    rows = VOCAB_MULTIPLE * -(-run.model.vocab // (VOCAB_MULTIPLE * run.layout.tp))
    logits = float(tokens * rows)
    weight = 0.0
    if not run.frozen:
        weight = linear_s(costs, tokens, rows, hidden, "bf16", part="weight_gradient")
    products = Passes(
        linear_s(costs, tokens, rows, hidden, "bf16"),
        linear_s(costs, tokens, rows, hidden, "bf16", part="input_gradient"),
        weight,
        1,
    )
    if run.software.loss_in_place:
        loss = Passes(memory_s(costs, "loss_in_place", 2 * 2.0 * logits), 0.0, 0.0, 1)
    else:
        # Over fp32 logits.
        forward, backward = (
            memory_s(costs, op, bytes_moved(op, logits, 4.0))
            for op in ("cross_entropy", "cross_entropy_backward")
        )
        loss = Passes(forward, backward, 0.0, 2)
    for _ in range(1 + (heads.depth if heads is not None else 0)):
        yield "head", products
        yield "loss", loss
