"""What gradients are multiplied by, and whether they are used at all, decided on the device."""

from typing import NamedTuple

import torch

from meshwright.run.train.optimizer.optimizer_config import GradScalerConfig


class GradReadiness(NamedTuple):
    """What is known about the gradients of a step before the update."""

    grad_norm: torch.Tensor
    """float32 scalar: their length, after scaling and before clipping."""
    grad_scale: torch.Tensor
    """float32 scalar: what the update multiplies them by, clipping included."""
    is_finite: torch.Tensor
    """bool scalar: whether they are all finite."""


def compute_clip_scale(
    norm: torch.Tensor, grad_scale: torch.Tensor | None, clip: float | None
) -> GradReadiness:
    """Judge gradients of length `norm` that have to be multiplied by `grad_scale`."""
    scale = torch.ones_like(norm) if grad_scale is None else grad_scale.to(norm)
    length = norm * scale.abs()
    go = torch.isfinite(length)
    if clip is not None:
        # As torch.nn.utils.clip_grad_norm_ does it.
        scale = scale * (clip / (length + 1e-6)).clamp(max=1.0)
    return GradReadiness(length, scale, go)


class DynamicGradScaler(NamedTuple):
    """The scale and how long it has held; both live on the device and are saved with the run."""

    scale: torch.Tensor
    """float32 scalar: what the loss is multiplied by before backward."""
    good_steps: torch.Tensor
    """int64 scalar: steps without an infinite gradient since the last change."""
    config: GradScalerConfig

    @classmethod
    def create(cls, settings: GradScalerConfig, device: torch.device) -> "DynamicGradScaler":
        """Return the scale of the first step."""
        scale = torch.tensor(settings.init_scale, dtype=torch.float32, device=device)
        return cls(scale, torch.zeros((), dtype=torch.int64, device=device), settings)

    def update_(self, go: torch.Tensor) -> None:
        """Note whether a step's gradients were finite; nothing is waited for."""
        self.good_steps.add_(1).mul_(go)
        grows = self.good_steps >= self.config.growth_interval
        factor = torch.where(grows, self.config.growth_factor, 1.0)
        self.scale.mul_(torch.where(go, factor, self.config.backoff_factor))
        # Below 1 it would shrink gradients; above 2²⁴ float32 sums of the loss lose digits.
        self.scale.clamp_(1.0, 2.0**24)
        self.good_steps.mul_(~grows)
