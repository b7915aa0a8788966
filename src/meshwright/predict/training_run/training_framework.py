"""What the training software makes of the hardware: which kernels, how well fused."""

from typing import Literal

import msgspec

from meshwright.predict.network.expert_dispatch import DispatcherKind

AttentionBackend = Literal["native", "flash2", "flash1", "unfused"]
FusionLevel = Literal["fused", "native", "partial", "eager"]


class TrainingFramework(msgspec.Struct, frozen=True, kw_only=True):
    """How a framework runs the operations between the matrix products."""

    attention: AttentionBackend = "native"
    """Flash-style kernel of the day, FlashAttention-2 or the first ones on newer GPUs; or unfused:
    the score matrix is stored, as everywhere before 2022."""
    fusion: FusionLevel = "fused"
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
    cuda_graphs: bool = False
    """CUDA graphs launch the layers, so that the host never sets the pace."""
    dispatcher: DispatcherKind = "alltoall"
    """How tokens reach their experts: NCCL's all-to-all, or kernels that cross the network once."""
    fused_experts: bool = False
    """The experts' activation, casts and permutation happen inside their products and exchanges."""
    rng_state_sync: bool = False
    """Every recomputed layer waits for the host, which saves and restores random states."""
    early_stop: bool = False
    """Recompute ends once every kept tensor is back: a layer's last product does not run again."""
    recompute_activation_in_backward: bool = False
    """A gated activation that is not kept is made again by its own backward, on the way."""
    fused_residual_norm: bool = False
    """The norm's kernel adds the residual on its way."""
    loss_in_place: bool = False
    """One kernel turns 16-bit logits into their gradient where they lie, in the forward pass."""
    casts_weights_each_step: bool = False
    """Weights are kept in 16 bits and quantised in every step."""
    set_to_none: bool = False
    """Gradients are let go after the update; backward makes them anew as it frees activations."""
    single_permute: bool = False
    """Where all experts are on one rank, tokens are sorted once."""
    bf16_experts: bool = False
    """Routed experts multiply in 16 bits whatever the precision of other products."""
    kernel_library: str = ""
    """Whose kernels it runs, where they may have been measured as it calls them: the `software` of
    a `Calibration`."""
    prefetch_sharded_params: bool = True
    """Gathers of sharded parameters run ahead behind compute."""
    skip_optimizer_barrier: bool = True
    """Under zero-bubble schedules, ranks update without waiting for each other."""


MEGATRON = TrainingFramework()
"""Megatron-Core with Transformer Engine and its kin."""
EAGER = TrainingFramework(
    attention="flash2", fusion="eager", fused_accumulation=False, early_stop=True
)
"""Plain PyTorch with FSDP and FlashAttention-2."""
MEGATRON_2021 = TrainingFramework(attention="unfused", fusion="partial")
"""Megatron-LM before flash kernels."""
MESHWRIGHT = TrainingFramework(
    skip_optimizer_barrier=False, early_stop=True, recompute_activation_in_backward=True,
    fused_residual_norm=True,
    loss_in_place=True, casts_weights_each_step=True, set_to_none=True, single_permute=True,
    bf16_experts=True, tp_async=False, kernel_library="meshwright",
)  # fmt: skip
"""Our own trainer: every rank waits for the norm of all gradients before it updates, and for each
tensor-parallel collective where it stands, unless products are cut into pieces (`overlap_tp`)."""

FRAMEWORKS: dict[str, TrainingFramework] = {
    "megatron": MEGATRON,
    "eager": EAGER,
    "meshwright": MESHWRIGHT,
}
"""What a user may name."""
