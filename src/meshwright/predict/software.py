"""What the training software makes of the hardware: which kernels, how well fused."""

from typing import Literal

import msgspec

from meshwright.predict.cost.curves import AttentionKernel

Fusion = Literal["fused", "partly", "eager"]


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """How a framework runs the operations between the matrix products."""

    attention: AttentionKernel | None = "native"
    """Flash-style kernel of the day, FlashAttention-2 on newer GPUs, or None: the score matrix is
    stored, as everywhere before 2022."""
    fusion: Fusion = "fused"
    """Norms, activations and residuals in fused kernels; some of them, with dropout between; or one
    PyTorch kernel per operation."""
    tp_overlap: bool = False
    """Products are split so that tensor-parallel communication hides, whatever the layout says."""


MEGATRON = Software()
"""Megatron-Core with Transformer Engine and its kin."""
EAGER = Software(attention="flash2", fusion="eager")
"""Plain PyTorch with FSDP and FlashAttention-2."""
MEGATRON_2021 = Software(attention=None, fusion="partly")
"""Megatron-LM before flash kernels."""
