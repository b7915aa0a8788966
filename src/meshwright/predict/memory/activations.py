"""Bytes a block keeps between forward and backward for each token on one rank.

Formats: activations in two bytes (four under fp32), inputs of products below two bytes in their
own. Which tensors a block keeps is `list_saved_tensors`' to say; for a plain GPT block they make 32
bytes per token and channel. It does not know how many are in flight.
"""

from typing import Literal

from meshwright.predict.memory.saved_tensors import (
    ActivationTensor,
    list_adapter_tensors,
    list_saved_tensors,
)
from meshwright.predict.training_run.training_framework import MEGATRON, TrainingFramework
from meshwright.spec.layout import Layout, RecomputeOp
from meshwright.spec.model import BlockSpec
from meshwright.spec.workload import LoRASpec

RecomputeSelection = tuple[RecomputeOp, ...] | Literal["alternate"]
"""The operations computed again, or all but every second product (PyTorch's selective way)."""

LOW_PRECISION_BYTES = {
    "fp8-tensorwise": 1.0,
    "fp8-rowwise": 1.0,
    "fp8-blockwise": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes of one number with its share of scales, in the formats of products below two bytes."""


def uses_torch_autograd(layout: Layout, software: TrainingFramework) -> bool:
    """Return whether PyTorch's own autograd and sharding hold the memory, not Megatron's."""
    return software.fusion in {"eager", "native"} or layout.zero == 3


def list_recomputed_ops(layout: Layout, software: TrainingFramework) -> RecomputeSelection:
    """Return what selective recompute computes again in some software.

    Where PyTorch's own machinery runs it and no operation is named, it keeps the output of every
    second product. Naming the attention core alone says no more where that is a flash kernel.
    """
    if layout.recompute != "selective":
        return ()
    named = set(layout.recompute_ops) - {"core_attn"}
    flash = software.attention != "unfused"
    native = uses_torch_autograd(layout, software)
    return "alternate" if native and flash and not named else layout.recompute_ops


def activation_bytes_per_token(
    layout: Layout,
    block: BlockSpec,
    hidden: int,
    recomputed: RecomputeSelection = (),
    *,
    software: TrainingFramework = MEGATRON,
    length: int = 0,
    adapter: LoRASpec | None = None,
    expert_load: float = 1.0,
) -> float:
    """Return the bytes one token leaves on one rank after a forward pass through a block.

    `adapter` is what is trained beside frozen weights, `expert_load` what the busiest rank's
    experts get over the mean.
    """
    total = 0.0
    tensors = list_saved_tensors(block, hidden, software, length)
    if adapter is not None:
        tensors += list_adapter_tensors(block, hidden, adapter, software)
    for saved in tensors:
        share = 1.0
        if recomputed == "alternate":
            share = saved.alternate_share
        elif saved.dropped_by.intersection(recomputed):
            continue
        if adapter is None:
            size = saved_bytes(layout, saved, software)
        elif saved.read_by and not is_read_by_adapter(adapter, saved):
            share = min(share, saved.frozen_share)
            size = _number(layout) * saved.width / _ranks(layout, saved)
        else:
            size = _adapted_bytes(layout, saved, software)
        total += share * size * (expert_load if saved.is_routed else 1.0)
    return total


def is_read_by_adapter(adapter: LoRASpec, saved: ActivationTensor) -> bool:
    """Return whether some adapter's gradient needs a tensor."""
    return not set(adapter.targets).isdisjoint(saved.read_by)


def saved_bytes(
    layout: Layout, saved: ActivationTensor, software: TrainingFramework = MEGATRON
) -> float:
    """Return the bytes per token of one tensor on one rank."""
    number = _number(layout)
    if uses_torch_autograd(layout, software):
        # Autograd keeps what a product read, which is gathered over tensor ranks by then.
        gathered = saved.is_gemm_input and saved.split == "sequence"
        return number * saved.width / (1 if gathered else _ranks(layout, saved))
    low = LOW_PRECISION_BYTES.get(layout.precision, number)
    if saved.name == "attention_out" and low < number:
        # Attention keeps its output as it is; the projection keeps a cast one beside it.
        number += low
    elif saved.is_gemm_input:
        number = low
    return number * saved.width / _ranks(layout, saved)


def _number(layout: Layout) -> float:
    return 4.0 if layout.precision == "fp32" else 2.0


def _adapted_bytes(layout: Layout, saved: ActivationTensor, software: TrainingFramework) -> float:
    """Return the bytes per token of a tensor that adapters read, or no product at all.

    Adapters read two-byte numbers, and whole where tensor ranks split the sequence: Megatron's
    norms then return their output gathered, and plain autograd keeps what it gathered.
    """
    if not saved.read_by:
        return saved_bytes(layout, saved, software)
    return _number(layout) * saved.width / (1 if saved.is_all_gathered else _ranks(layout, saved))


def backward_bytes_per_token(
    layout: Layout,
    block: BlockSpec,
    hidden: int,
    *,
    software: TrainingFramework = MEGATRON,
    length: int = 0,
    expert_load: float = 1.0,
) -> float:
    """Return the bytes alive inside a block only while its backward runs, per token.

    The feed-forward part goes first and the mixer when that is gone; each has as many gradients as
    tensors. Around them lie the stream's gradient and one product input gathered over tensor ranks.
    Context-parallel ranks hold others' keys and values: all of them, or those in use and the next.
    """
    parts = {"mixer": 0.0, "mlp": 0.0, "stream": 0.0}
    foreign = 0.0
    for saved in list_saved_tensors(block, hidden, software, length):
        size = saved_bytes(layout, saved, software) * (expert_load if saved.is_routed else 1.0)
        parts[saved.part] += size
        if saved.name == "kv" and layout.cp > 1:
            foreign = size * (layout.cp if layout.cp_kind == "allgather" else 2)
    number = _number(layout)
    widest = max(parts["mlp"], parts["mixer"] - parts["mlp"])
    return widest + foreign + 2 * number * hidden


def boundary_bytes_per_token(layout: Layout, hidden: int) -> float:
    """Return the bytes of a layer's input, all that full recompute keeps of a layer."""
    return _number(layout) * hidden / (layout.tp if layout.sequence_parallel else 1)


def _ranks(layout: Layout, saved: ActivationTensor) -> float:
    if saved.split == "tensor":
        return min(layout.tp, saved.max_shards or layout.tp)
    if saved.split == "routed":
        # A stage's tokens are spread over all its ranks; the ranks of one expert share theirs.
        return layout.tp / layout.effective_expert_tp
    return layout.tp if saved.split == "sequence" and layout.sequence_parallel else 1
