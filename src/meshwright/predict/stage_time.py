"""Time of one microbatch on one pipeline rank: blocks, embedding, head, recompute."""

from typing import NamedTuple

from meshwright.predict.block_comm import BlockComm, block_comm
from meshwright.predict.block_time import Passes, block_passes
from meshwright.predict.cost import bytes_moved, linear_s, memory_s
from meshwright.predict.recompute_time import recompute_s
from meshwright.predict.run import Run
from meshwright.spec.layout import Chunk, chunks, rank_chunks
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


class _Layer(NamedTuple):
    passes: Passes
    comm: BlockComm
    recompute: float


def stage_times(run: Run) -> tuple[StageTime, ...]:
    """Return the time of a microbatch on one rank of every pipeline stage."""
    layers = {block.name: _layer(run, block) for block in run.model.blocks}
    return tuple(_stage(run, held, layers) for held in rank_chunks(run.layout, run.model.layers))


def chunk_times(run: Run) -> tuple[ChunkTime, ...]:
    """Return the time of a microbatch in every chunk, in the order a token meets them."""
    layers = {block.name: _layer(run, block) for block in run.model.blocks}
    by_position = {chunk.position: chunk for chunk in chunks(run.layout, run.model.layers)}
    return tuple(_chunk(run, chunk, layers) for chunk in by_position.values())


def _chunk(run: Run, chunk: Chunk, layers: dict[str, _Layer]) -> ChunkTime:
    used = _used(run, (chunk,), layers)
    return ChunkTime(
        _stage(run, (chunk,), layers),
        sum(layer.comm.tp_forward for layer in used),
        sum(layer.comm.cp_forward for layer in used),
        sum(layer.comm.ep_forward for layer in used),
    )


def _layer(run: Run, block: Block) -> _Layer:
    passes = block_passes(run, block)
    comm = block_comm(run, block, passes)
    if not run.software.graphs:
        passes, comm = _launched(run, block, passes, comm)
    return _Layer(passes, comm, recompute_s(run, block, passes, comm))


def _launched(run: Run, block: Block, passes: Passes, comm: BlockComm) -> tuple[Passes, BlockComm]:
    """Let the host set the pace where kernels are short; exchanges go on while the GPU waits."""
    host_s = passes.kernels * run.costs.launch.host_s
    if isinstance(block.mlp, Experts):
        host_s += run.constants.expert_host_s
    late = max(0.0, host_s - passes.forward)
    late_back = max(0.0, 2 * host_s - passes.backward)
    share = run.constants.host_overlap
    comm = comm._replace(
        ep_forward=comm.ep_forward - share * min(comm.ep_forward, late),
        ep_backward=comm.ep_backward - share * min(comm.ep_backward, late_back),
    )
    slower = passes._replace(
        forward=passes.forward + late, input_gradient=passes.input_gradient + late_back
    )
    return slower, comm


def _used(run: Run, held: tuple[Chunk, ...], layers: dict[str, _Layer]) -> list[_Layer]:
    """The layers of some chunks, those of multi-token heads last."""
    names = run.model.layer_names
    used = [layers[name] for chunk in held for name in names[chunk.first : chunk.last]]
    heads = run.model.multi_token
    if heads is not None and any(chunk.has_head for chunk in held):
        used += [layers[heads.block]] * heads.depth
    return used


def _stage(run: Run, held: tuple[Chunk, ...], layers: dict[str, _Layer]) -> StageTime:
    used = _used(run, held, layers)
    heads = run.model.multi_token
    ends = Passes()
    if any(chunk.has_embedding for chunk in held):
        moved = memory_s(run.costs, "copy", 4.0 * run.tokens * run.model.hidden)
        ends += Passes(moved, moved)
    if any(chunk.has_head for chunk in held):
        ends += _head(run)
        if heads is not None:
            for _ in range(heads.depth):
                ends += _head(run)
    covered = run.layout.recompute_layers
    share = 1.0 if covered is None or not used else min(1.0, covered * len(held) / len(used))
    recompute = share * sum(layer.recompute for layer in used)
    compute = ends.forward + ends.backward
    compute += sum(layer.passes.forward + layer.passes.backward for layer in used)
    return StageTime(
        forward=ends.forward + sum(layer.passes.forward + layer.comm.forward for layer in used),
        backward=ends.backward
        + recompute
        + sum(layer.passes.backward + layer.comm.backward for layer in used),
        weight_gradient=ends.weight_gradient + sum(layer.passes.weight_gradient for layer in used),
        compute=compute,
        recompute=recompute,
        tp=sum(layer.comm.tp_forward + layer.comm.tp_backward for layer in used),
        cp=sum(layer.comm.cp_forward + layer.comm.cp_backward for layer in used),
        ep=sum(layer.comm.ep_forward + layer.comm.ep_backward for layer in used),
    )


VOCAB_MULTIPLE = 128
"""What Megatron pads a rank's rows of the vocabulary to."""


def _head(run: Run) -> Passes:
    """The output head in bf16, and the loss over fp32 logits."""
    costs, tokens, hidden = run.costs, run.tokens, run.model.hidden
    # Trainers pad the vocabulary, so that each rank's share makes whole tiles.
    rows = VOCAB_MULTIPLE * -(-run.model.vocab // (VOCAB_MULTIPLE * run.layout.tp))
    logits = float(tokens * rows)
    loss = memory_s(costs, "cross_entropy", bytes_moved("cross_entropy", logits, 4.0))
    back = memory_s(
        costs, "cross_entropy_backward", bytes_moved("cross_entropy_backward", logits, 4.0)
    )
    weight = 0.0
    if not run.frozen:
        weight = linear_s(costs, tokens, rows, hidden, "bf16", part="weight_gradient")
    return Passes(
        linear_s(costs, tokens, rows, hidden, "bf16") + loss,
        linear_s(costs, tokens, rows, hidden, "bf16", part="input_gradient") + back,
        weight,
        3,
    )
