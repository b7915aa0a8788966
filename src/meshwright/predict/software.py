"""What the training software makes of the hardware: which kernels, how well fused."""

from typing import Literal

import msgspec

from meshwright.predict.network.experts import Style

AttentionSoftware = Literal["native", "flash2", "flash1", "unfused"]
Fusion = Literal["fused", "native", "partly", "eager"]


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """How a framework runs the operations between the matrix products."""

    attention: AttentionSoftware = "native"
    """Flash-style kernel of the day, FlashAttention-2 or the first ones on newer GPUs; or unfused:
    the score matrix is stored, as everywhere before 2022."""
    fusion: Fusion = "fused"
    """Norms, activations and residuals in fused kernels; in PyTorch's own (a layer norm and a GELU
    are one each); some fused, with dropout between; or one kernel per arithmetic operation."""
    tp_overlap: bool = False
    """Products are split so that tensor-parallel communication hides, whatever the layout says."""
    delayed_scaling: bool = False
    """Eight-bit scales of a whole tensor come from the step before, not from the tensor itself."""
    tp_async: bool = True
    """Backward's tensor-parallel communication runs beside the weight gradients."""
    fused_accumulation: bool = True
    """Weight gradients are added into their buffer by the product itself."""
    overlap_exchange: bool = True
    """Gradients are exchanged while backward runs, and scattered where their states are; without,
    all are reduced everywhere after the last pass."""
    graphs: bool = False
    """CUDA graphs launch the layers, so that the host never sets the pace."""
    dispatcher: Style = "pairwise"
    """How tokens reach their experts: NCCL's all-to-all, or kernels that cross the network once."""
    fused_experts: bool = False
    """The experts' activation, casts and permutation happen inside their products and exchanges."""
    checkpoint_waits: bool = False
    """Every recomputed layer waits for the host, which saves and restores random states."""
    early_stop: bool = False
    """Recompute ends once every kept tensor is back: a layer's last product does not run again."""
    activates_backward: bool = False
    """A gated activation that is not kept is made again by its own backward, on the way."""
    norm_adds: bool = False
    """The norm's kernel adds the residual on its way."""
    loss_in_place: bool = False
    """One kernel turns 16-bit logits into their gradient where they lie, in the forward pass."""
    casts_weights: bool = False
    """Weights are kept in 16 bits and quantised in every step."""
    drops_gradients: bool = False
    """Gradients are let go after the update; backward makes them anew as it frees activations."""
    one_permute: bool = False
    """Where all experts are on one rank, tokens are sorted once."""
    wide_experts: bool = False
    """Routed experts multiply in 16 bits whatever the precision of other products."""
    kernels: str = ""
    """Whose kernels it runs, where they may have been measured as it calls them: the `software` of
    a `Calibration`."""
    overlap_sharded: bool = True
    """Gathers of sharded parameters run ahead behind compute."""
    ends_apart: bool = True
    """Under zero-bubble schedules, ranks update without waiting for each other."""


MEGATRON = Software()
"""Megatron-Core with Transformer Engine and its kin."""
EAGER = Software(attention="flash2", fusion="eager", fused_accumulation=False, early_stop=True)
"""Plain PyTorch with FSDP and FlashAttention-2."""
MEGATRON_2021 = Software(attention="unfused", fusion="partly")
"""Megatron-LM before flash kernels."""
MESHWRIGHT = Software(
    ends_apart=False, early_stop=True, activates_backward=True, norm_adds=True,
    loss_in_place=True, casts_weights=True, drops_gradients=True, one_permute=True,
    wide_experts=True, tp_async=False, kernels="meshwright",
)  # fmt: skip
"""Our own trainer: every rank waits for the norm of all gradients before it updates, and for each
tensor-parallel collective where it stands, unless products are cut into pieces (`overlap_tp`)."""

SOFTWARE: dict[str, Software] = {"megatron": MEGATRON, "eager": EAGER, "meshwright": MESHWRIGHT}
"""What a user may name."""
