"""What kernels that draw tokens read: settings by row of the engine, and whose each line is."""

from typing import NamedTuple

import torch


class RowSamplingTensors(NamedTuple):
    """Settings of every row of an engine, on its device, each of shape (rows,)."""

    temperature: torch.Tensor
    """float32; 0 takes the likeliest token."""
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    """int64; 0 leaves all."""
    seed: torch.Tensor
    """int64."""
    num_sampled: torch.Tensor
    """int64: tokens that the row has drawn so far, which is the position of its next draw."""

    has_seed: torch.Tensor
    """int64: 1 where the seed was asked for."""


class LogitRows(NamedTuple):
    """Whose token each line of logits is to give; both of shape (lines,)."""

    rows: torch.Tensor
    """int64."""
    offsets: torch.Tensor
    """int64: how many tokens after the row's next one; not 0 only where tokens were proposed."""
