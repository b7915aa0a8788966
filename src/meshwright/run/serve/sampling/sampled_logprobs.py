"""Log-probabilities where they are asked for: the model's own, before anything changed logits."""

from typing import NamedTuple

import torch

from meshwright.run.serve.sampling.sampling_metadata import SamplingMetadata


class SampledLogprobs(NamedTuple):
    """Log-probabilities of the lines `SamplingMetadata.logprob_rows`."""

    token_logprobs: torch.Tensor
    """Of the tokens that were drawn."""
    top_logprobs: torch.Tensor
    """Of the likeliest ones, as many as any line asks for."""
    top_token_ids: torch.Tensor


def copy_raw_logits(logits_LV: torch.Tensor, lines: SamplingMetadata) -> torch.Tensor | None:
    """Keep the logits that will be told of, before they are changed in place."""
    return None if lines.logprob_rows_index is None else logits_LV[lines.logprob_rows_index].float()


def gather_logprobs(
    raw_TV: torch.Tensor | None, lines: SamplingMetadata, tokens_L: torch.Tensor
) -> SampledLogprobs | None:
    """Return log-probabilities of the tokens drawn, and of the likeliest."""
    if raw_TV is None:
        return None
    whole_T1 = raw_TV.logsumexp(1, keepdim=True)
    tokens_T1 = tokens_L[lines.logprob_rows_index, None].clamp(min=0)
    own_T = (raw_TV.gather(1, tokens_T1) - whole_T1).squeeze(1)
    top_TK, top_tokens_TK = raw_TV.topk(min(lines.max_top_logprobs, raw_TV.shape[1]), dim=1)
    return SampledLogprobs(own_T, top_TK - whole_T1, top_tokens_TK)
