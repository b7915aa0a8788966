"""Masks of grammars over the vocabulary: a bit per token, 32 to a word, lowest first."""

import torch


def forbid(logits_LV: torch.Tensor, mask_LW: torch.Tensor) -> None:
    """Set logits to -inf, in place, whose bit in the mask is 0."""
    bits_32 = torch.arange(32, dtype=torch.int32, device=mask_LW.device)
    allowed_LWB = (mask_LW[:, :, None] >> bits_32) & 1
    allowed_LV = allowed_LWB.flatten(1)[:, : logits_LV.shape[1]].bool()
    logits_LV.masked_fill_(~allowed_LV, -torch.inf)
