"""Attention over latents that lie in pages: keys and values are the same vectors.

Shapes: N tokens, H query heads, E width of what is kept of a token, L its latent part.
"""

import torch
from torch import Tensor

from meshwright.run.kernels.paged_plain import Shaping, plain_paged_prefill
from meshwright.run.serve.model.cache import LayerCache
from meshwright.run.serve.model.step import Step


def attend_latents(
    q_NHE: Tensor, layer: LayerCache, step: Step, *, scale: float, latent: int
) -> Tensor:
    """Return the mean of the latents that each head of each token reads, (N, H, L).

    Queries are of the whole width of what is kept: first what meets the latent, then what meets the
    rotary key.
    """
    keys = layer.keys.unsqueeze(2)
    read_NHE = plain_paged_prefill(
        q_NHE, keys, keys, step.tables_RB, step.lengths_R, step.starts_R1, Shaping(scale),
        layer.key_scale, layer.key_scale,
    )  # fmt: skip
    return torch.narrow(read_NHE, -1, 0, latent)
