"""Make a `Decoder` of a `Model`, without memory or on a device."""

from dataclasses import dataclass

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.spec.model import Model


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What a model's description leaves open."""

    include_mtp: bool = True
    """Build the heads that predict further tokens, where the model has them."""
    mtp_loss_scaling_factor: float = 0.1
    """Their share in the loss, as Megatron's `mtp_loss_scaling_factor`."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the loss that spreads tokens over experts, summed over layers; 0 leaves it out."""
    z_loss_coeff: float = 0.0
    """Multiple of log²Σexp(logits) that is added to the loss (PaLM)."""
    capacity_factor: float | None = None
    """Tokens that an expert takes in training, as a multiple of an equal share; None takes all."""


DEFAULT_BUILD_OPTIONS = BuildOptions()


def build_decoder(
    model: Model,
    *,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.bfloat16,
    options: BuildOptions = DEFAULT_BUILD_OPTIONS,
) -> Decoder:
    """Return the modules of a model's text part; on `meta` they take no memory.

    Parameters hold nothing useful until `materialize` or a checkpoint fills them.
    """
    decoder = Decoder(model, multi_token=options.include_mtp, device=device, dtype=dtype)
    decoder.mtp_loss_scaling_factor = options.mtp_loss_scaling_factor
    decoder.z_loss_coeff, decoder.moe_aux_loss_coeff = (
        options.z_loss_coeff,
        options.moe_aux_loss_coeff,
    )
    for part in decoder.iter_moe_layers():
        part.records_balance_loss = options.moe_aux_loss_coeff > 0
        part.capacity_factor = options.capacity_factor
    return decoder
