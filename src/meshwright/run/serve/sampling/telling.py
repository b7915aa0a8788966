"""Log-probabilities where they are asked for: the model's own, before anything changed logits."""

from typing import NamedTuple

import torch

from meshwright.run.serve.sampling.lines import Lines


class Told(NamedTuple):
    """Log-probabilities of the lines `Lines.told`."""

    own: torch.Tensor
    """Of the tokens that were drawn."""
    top: torch.Tensor
    """Of the likeliest ones, as many as any line asks for."""
    top_tokens: torch.Tensor


def raw_of(logits_LV: torch.Tensor, lines: Lines) -> torch.Tensor | None:
    """Keep the logits that will be told of, before they are changed in place."""
    return None if lines.told_index is None else logits_LV[lines.told_index].float()


def tell(raw_TV: torch.Tensor | None, lines: Lines, tokens_L: torch.Tensor) -> Told | None:
    """Return log-probabilities of the tokens drawn, and of the likeliest."""
    if raw_TV is None:
        return None
    whole_T1 = raw_TV.logsumexp(1, keepdim=True)
    tokens_T1 = tokens_L[lines.told_index, None].clamp(min=0)
    own_T = (raw_TV.gather(1, tokens_T1) - whole_T1).squeeze(1)
    top_TK, top_tokens_TK = raw_TV.topk(min(lines.top, raw_TV.shape[1]), dim=1)
    return Told(own_T, top_TK - whole_T1, top_tokens_TK)
