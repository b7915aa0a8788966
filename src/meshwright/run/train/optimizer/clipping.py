"""What gradients are multiplied by, and whether they are used at all, decided on the device."""

from typing import NamedTuple

import torch


class Readiness(NamedTuple):
    """What is known about the gradients of a step before the update."""

    norm: torch.Tensor
    """float32 scalar: their length, after scaling and before clipping."""
    grad_scale: torch.Tensor
    """float32 scalar: what the update multiplies them by, clipping included."""
    go: torch.Tensor
    """bool scalar: whether they are all finite."""


def readiness(norm: torch.Tensor, grad_scale: torch.Tensor | None, clip: float | None) -> Readiness:
    """Judge gradients of length `norm` that have to be multiplied by `grad_scale`."""
    scale = torch.ones_like(norm) if grad_scale is None else grad_scale.to(norm)
    length = norm * scale.abs()
    go = torch.isfinite(length)
    if clip is not None:
        # As torch.nn.utils.clip_grad_norm_ does it.
        scale = scale * (clip / (length + 1e-6)).clamp(max=1.0)
    return Readiness(length, scale, go)
