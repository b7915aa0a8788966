"""What a rank holds beside states and activations: copies, gathered weights, logits, the runtime.

Each lives for a moment or belongs to no tensor of the model. Sizes follow from the layout and from
the kind of software; the few constants stand in `MemoryConstants`. It does not know which of them
meet at the peak: `predict.memory` adds them up.
"""

import math

import msgspec

from meshwright.predict.memory.activations import LOW_PRECISION_BYTES, uses_torch_autograd
from meshwright.predict.network.nccl_constants import parse_sm
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import RankParameters
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT, OPTIMIZER_MOMENTS


class MemoryConstants(msgspec.Struct, frozen=True, kw_only=True):
    """What measured memory adds to the tensors that can be counted."""

    fragmentation: float = 0.12
    """Share by which the allocator's pool outgrows the tensors in it where there is room: blocks
    that fit no request. Found on the published rows that measured the pool or the device."""
    fragmentation_when_full: float = 0.064
    """What is left of it where there is none, as the allocator then returns blocks it only kept:
    SimuMax fills 94 % of a pool."""
    context_bytes: int = round(1.1 * 2**30)
    """CUDA context with the kernels loaded, and what the driver keeps for itself, half each."""
    communicator_bytes: int = 392 * 10**6
    """Buffers of one NCCL communicator, as aiconfigurator measured it with four GPUs or more."""
    bucket_bytes: int = 2 * 10**9
    """Buckets in which plain software reduces gradients and gathers weights: DeepSpeed takes 500
    million numbers for each."""
    sharded_logit_bytes: int = 6
    """Bytes per logit at the peak of Megatron's loss: two, and the softmax in fp32 in place."""
    torch_logit_bytes: int = 12
    """The same in plain PyTorch: log-probabilities and two gradients, all fp32."""
    inplace_logit_bytes: int = 4
    """The same in the loss that came with the first flash kernels: logits and gradient in two."""
    logit_chunk_bytes: int = 8 << 30
    """Most that our own loss takes for logits at a time; a smaller device's share is next."""
    logit_chunk_share: int = 16
    """A device's memory over that of its chunk."""


MEMORY_CONSTANTS = MemoryConstants()


def logits_bytes(run: TrainingRun, constants: MemoryConstants) -> int:
    """Return the logits of a microbatch, their softmax and their gradient."""
    if run.framework.loss_in_place:
        return _turned_bytes(run, constants)
    each = constants.sharded_logit_bytes
    if uses_torch_autograd(run.layout, run.framework):
        first = run.framework.attention == "flash1"
        each = constants.inplace_logit_bytes if first else constants.torch_logit_bytes
    return round(run.microbatch_tokens * each * run.model.vocab / run.layout.tp)


def _turned_bytes(run: TrainingRun, constants: MemoryConstants) -> int:
    """Return a chunk of logits that become gradients in place, and what these leave at once.

    That is the gradient of the head's weight, in fp32 where several chunks are added up, and of its
    input.
    """
    words, hidden = run.model.vocab / run.layout.tp, run.model.hidden
    most = min(
        constants.logit_chunk_bytes, run.cluster.gpu.memory_bytes // constants.logit_chunk_share
    )
    logits = run.microbatch_tokens * 2 * words
    chunks = max(1, math.ceil(logits / most))
    each = 4 if chunks > 1 else min(4, BYTES_PER_ELEMENT[run.layout.gradient_precision])
    weight = 0 if run.frozen else each * words * hidden
    return round(logits / chunks + weight + 2 * run.microbatch_tokens * hidden)


def weight_buffer_bytes(
    run: TrainingRun, parameters: RankParameters, layers: int, constants: MemoryConstants
) -> int:
    """Return the copies of weights and gradients that a rank makes for a while."""
    layout = run.layout
    casts = (
        _layer_parameters(parameters, layers) * 2 * LOW_PRECISION_BYTES.get(layout.precision, 0.0)
    )
    if layout.zero == 3:
        return round(casts) + _gathered_bytes(run, parameters, layers)
    if run.framework.fused_accumulation or run.frozen or layout.dp * layout.cp == 1:
        return round(casts)
    if layout.gradient_precision != "fp32" or layout.zero == 2:
        return round(casts) + constants.bucket_bytes
    # Backward's own gradients lie beside their sum; a pipeline reduces that sum in buckets.
    buckets = constants.bucket_bytes if layout.pp > 1 else 0
    return round(casts) + 2 * parameters.total + buckets


def _layer_parameters(parameters: RankParameters, layers: int) -> int:
    return -(-(parameters.matrices + parameters.experts) // max(1, layers))


def _gathered_bytes(run: TrainingRun, parameters: RankParameters, layers: int) -> int:
    """Return weights gathered for use, and gradients not reduced yet, where both are sharded.

    Weights are gathered one piece ahead; gradients exist whole before they are reduced, and once
    more in the format of their sum. A piece is a layer, or a matrix in the software of fp16's days.
    Beside a pipeline PyTorch keeps both whole through the step.
    """
    layout = run.layout
    accumulated = BYTES_PER_ELEMENT[layout.gradient_precision]
    if layout.pp > 1:
        return parameters.total * (2 if run.frozen else 2 + accumulated)
    piece = _layer_parameters(parameters, layers)
    if run.framework.attention == "unfused":
        weights = (
            weight for block in run.model.blocks for weight in block.list_weights(run.model.hidden)
        )
        piece = max(weight.count_rank_parameters(layout.tp, layout.ep) for weight in weights)
    ends = parameters.others
    head = ends if run.model.tied else ends // 2
    # Frozen weights have no gradients, and those of adapters are small.
    unreduced = 0 if run.frozen else (2 + accumulated) * max(piece, head)
    return 2 * 2 * piece + 2 * ends + unreduced


def stores_fp8_weights(run: TrainingRun) -> bool:
    """Return whether matrices are kept in one byte: fp8 with one scale, on Blackwell.

    Hopper's products want a transposed copy of each, which makes two bytes again.
    """
    layout = run.layout
    blackwell = (parse_sm(run.cluster.gpu.arch) or 0) >= 100
    scaled = layout.precision == "fp8-tensorwise"
    return scaled and blackwell and not uses_torch_autograd(layout, run.framework)


def optimizer_step_bytes(run: TrainingRun, optimizer_bytes: int) -> int:
    """Return what the optimizer's step makes for itself: its shard of the gradients in fp32."""
    layout = run.layout
    each = BYTES_PER_ELEMENT[layout.master_precision]
    each += OPTIMIZER_MOMENTS[layout.optimizer] * BYTES_PER_ELEMENT[layout.moment_precision]
    if layout.gradient_precision == "fp32" or layout.master_precision == "none":
        return 0
    return 4 * optimizer_bytes // each


def stage_output_bytes_per_token(run: TrainingRun) -> float:
    """Return what a stage keeps of its output until its gradient comes back.

    Later Megatron frees it once it is sent.
    """
    if run.layout.pp == 1 or run.framework.fusion == "fused":
        return 0.0
    return 2 * run.model.hidden / (run.layout.tp if run.layout.sequence_parallel else 1)


def runtime_bytes(run: TrainingRun, constants: MemoryConstants) -> int:
    """Return what the process holds outside the allocator: the context and NCCL's buffers."""
    layout = run.layout
    # A pipeline talks to its two neighbours, and its ends to each other.
    sizes = (layout.tp, layout.cp, *3 * (layout.pp,), layout.dp, layout.ep, layout.gpus)
    groups = sum(size > 1 for size in sizes)
    return constants.context_bytes + groups * constants.communicator_bytes
