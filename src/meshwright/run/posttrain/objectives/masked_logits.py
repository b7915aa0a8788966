"""Logits without given words, for the probability of all others together.

1 - Σ p of the given words is rounded away long before it is nought, and its gradient with it. A sum
over the others' own logits keeps every digit however small it is. Logits are the largest thing
around, so given ones are hidden in place, and shown again, in place of a copy.

Shapes: N tokens, W words, K of them given.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def mask_tokens(logits_NW: Tensor, at_NK: Tensor, given_NK: Tensor) -> Iterator[None]:
    """Let the logits at some places be -inf within, where `given_NK` says that a word is there.

    Places that hold no word may name any, given ones too.
    """
    if not logits_NW.shape[1]:  # a rank without words has none to hide
        yield
        return
    before = logits_NW.gather(1, at_NK)
    # Least and largest are the same in whichever order places are written.
    ends = torch.where(given_NK, -math.inf, math.inf).to(logits_NW.dtype)
    logits_NW.scatter_reduce_(1, at_NK, ends, "amin")
    yield
    logits_NW.scatter_reduce_(1, at_NK, before.masked_fill(~given_NK, -math.inf), "amax")


def finite_logsumexp(logsumexp: Tensor) -> Tensor:
    """Return what can be taken off logits, also where all of these are -inf."""
    return logsumexp.clamp(min=torch.finfo(logsumexp.dtype).min)
