"""Every fitted constant of the step model, in one place, each with its physical meaning.

They hold for all models and sources; those that say so belong to a generation of GPUs. How they
were found and what they give on sources left out of the fit stands in `docs/guide/step-model.md`.
"""

import msgspec


class StepConstants(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole training step adds to its kernels and collectives taken one by one."""

    gemm_slowdown: float = 1.128
    """How much longer a product takes inside a step than alone: neighbours in the stream leave
    gaps and cold caches. What power limits cost comes on top, from the device's own curve."""
    attention_slowdown: float = 1.175
    """The same for attention."""
    power_exponent: float = 0.5
    """How the sustained clock follows the power limit where a chip has less than its kind."""
    flash1_slowdown: float = 1.531
    """Time of the flash kernels of 2022 over those of FlashAttention-2."""
    scan_efficiency: float = 0.085
    """Share of the dense peak that chunked scans (Mamba, gated delta rule) reach."""
    fused_elementwise: float = 1.363
    """Passes over memory of a fused training step, relative to the fewest possible."""
    native_elementwise: float = 2
    """The same with PyTorch's own kernels for norm and activation."""
    partial_elementwise: float = 1.906
    """The same where only some of the work is fused, with dropout between."""
    eager_elementwise: float = 3.047
    """The same where PyTorch runs one kernel per operation."""
    expert_host_s: float = 0.0032
    """What the host takes to launch one layer of experts forward (routing, permutation, exchange,
    with the waits for token counts between) where no CUDA graph does it; backward takes twice."""
    rng_state_sync_s: float = 0.0069
    """What a layer waits for the host per microbatch where checkpointing stops for it."""
    tp_overlap_share: float = 0.638
    """Share of tensor-parallel communication hidden where products are split to overlap it."""
    exposed_bucket_share: float = 0.5
    """Share of gradient and parameter exchange that never hides: the first or last bucket."""
    expert_overlap_share: float = 0.406
    """Share of compute that can hide the experts' exchange where microbatches overlap it."""
    comm_sm_share: float = 0.424
    """Share of the chip that communication takes from the compute it hides behind."""


STEP_CONSTANTS = StepConstants()
"""The values in use."""
