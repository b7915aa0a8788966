"""Dynamic loss scaling: as large a scale as keeps fp16 gradients finite, found by trial."""

from typing import NamedTuple

import torch

from meshwright.run.train.optimizer.settings import LossScaleSettings


class LossScale(NamedTuple):
    """The scale and how long it has held; both live on the device and are saved with the run."""

    scale: torch.Tensor
    """float32 scalar: what the loss is multiplied by before backward."""
    sound_steps: torch.Tensor
    """int64 scalar: steps without an infinite gradient since the last change."""
    settings: LossScaleSettings

    @classmethod
    def start(cls, settings: LossScaleSettings, device: torch.device) -> "LossScale":
        """Return the scale of the first step."""
        scale = torch.tensor(settings.first, dtype=torch.float32, device=device)
        return cls(scale, torch.zeros((), dtype=torch.int64, device=device), settings)

    def update_(self, go: torch.Tensor) -> None:
        """Note whether a step's gradients were finite; nothing is waited for."""
        self.sound_steps.add_(1).mul_(go)
        grows = self.sound_steps >= self.settings.growth_steps
        factor = torch.where(grows, self.settings.growth, 1.0)
        self.scale.mul_(torch.where(go, factor, self.settings.backoff))
        # Below 1 it would shrink gradients; above 2²⁴ float32 sums of the loss lose digits.
        self.scale.clamp_(1.0, 2.0**24)
        self.sound_steps.mul_(~grows)
