"""Make a `Decoder` of a `Model`, without memory or on a device."""

from dataclasses import dataclass

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.spec.model import Model


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a model's description leaves open."""

    multi_token: bool = True
    """Build the heads that predict further tokens, where the model has them."""
    multi_token_weight: float = 0.1
    """Their share in the loss, as Megatron's `mtp_loss_scaling_factor`."""
    balance_weight: float = 0.0
    """Weight of the loss that spreads tokens over experts, summed over layers; 0 leaves it out."""
    z_loss: float = 0.0
    """Multiple of log²Σexp(logits) that is added to the loss (PaLM)."""
    capacity_factor: float | None = None
    """Tokens that an expert takes in training, as a multiple of an equal share; None takes all."""


DEFAULTS = Options()


def build(
    model: Model,
    *,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.bfloat16,
    options: Options = DEFAULTS,
) -> Decoder:
    """Return the modules of a model's text part; on `meta` they take no memory.

    Parameters hold nothing useful until `materialise` or a checkpoint fills them.
    """
    decoder = Decoder(model, multi_token=options.multi_token, device=device, dtype=dtype)
    decoder.multi_token_weight = options.multi_token_weight
    decoder.z_loss, decoder.balance_weight = options.z_loss, options.balance_weight
    for part in decoder.experts():
        part.keeps_balance_loss = options.balance_weight > 0
        part.capacity_factor = options.capacity_factor
    return decoder
