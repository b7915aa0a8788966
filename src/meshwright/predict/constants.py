"""Every fitted constant of the step model, in one place, each with its physical meaning.

They hold for all models, sources and GPUs; none is keyed by any of these. How they were found
and what they give on sources left out of the fit stands in `docs/guide/step-model.md`.
"""

import msgspec


class StepConstants(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole training step adds to its kernels and collectives taken one by one."""

    sustained: float = 1.25
    """How much longer products and attention take after seconds of full load than on a cool chip:
    power limits lower the clock, and neighbours in the stream leave gaps."""
    partly_elementwise: float = 1.25
    """Passes over memory of partly fused elementwise work with dropout, relative to fused kernels
    without."""
    eager_elementwise: float = 3.9
    """Passes over memory of unfused elementwise work, relative to fused kernels."""
    tp_hidden: float = 0.43
    """Share of tensor-parallel communication hidden where products are split to overlap it."""
    p2p_exposed: float = 0.6
    """Share of pipeline transfers that a steady schedule fails to hide."""
    bucket_exposed: float = 0.4
    """Share of gradient and parameter exchange that never hides: the first or last bucket."""
    overlap_share: float = 1.0
    """Share of a backward (forward) pass that gradient (parameter) exchange can hide behind."""
    ring_exposed: float = 0.0
    """Share of a context-parallel ring that never hides: its first step."""
    expert_hidden: float = 0.75
    """Share of compute that can hide the experts' exchange where microbatches overlap it."""


CONSTANTS = StepConstants()
"""The values in use."""
