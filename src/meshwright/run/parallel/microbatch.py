"""`Microbatch`: tokens, labels and document boundaries that pass through the pipeline stages."""
# ruff: noqa: N815  (letters of shapes)

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.nn.decoder import BatchLoss, FutureTokens


@dataclass(frozen=True, eq=False)
class Microbatch:
    """What a microbatch brings to every chunk it passes."""

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor | None = None
    documents: PackedSequences | None = None
    """Of whole sequences, also where the tokens are a part of them."""
    full_sequence_length: int | None = None
    """Tokens of a whole sequence, where these are a part of it."""
    future_tokens: FutureTokens | None = None
    """Tokens and labels that lie 1, 2, … places on, where these are not whole sequences."""
    source: object = None
    """What it was made of, for whoever judges it."""


HeadLoss = Callable[[Tensor, Microbatch], BatchLoss]
"""Returns the summed loss of a microbatch from what the output head reads of it."""
