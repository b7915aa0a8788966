"""`Sync`: what happens to gradients between backward and update, and to weights after it.

    sync.begin()                       before the passes of a step
    runner(parts, share, sync.last)    gradients are reduced while backward still runs
    gradients = sync.gradients()       complete, for the parameters the optimizer updates
    norm = sync.norm()
    sync.finish()                      after the update: every rank has all weights it computes with

Without sharding (`zero` 0) the optimizer updates the decoder's own parameters on every rank.
"""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from meshwright.run.kernels.gradient_norm import GradientNorm
from meshwright.run.parallel.gradients import global_norm, sum_parts, sum_replicas
from meshwright.run.parallel.spread import Spread


class Sync(Protocol):
    """Keeps the replicas of a model equal."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates, by the names of the whole model."""

    def begin(self) -> None:
        """Get ready for the passes of a step."""

    def last(self, chunk: int) -> None:
        """Note that the backward pass that follows completes the gradients of a chunk."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the complete gradients of what the optimizer updates."""

    def norm(self) -> GradientNorm:
        """Return the norm of the whole model's gradients, the same on every rank."""

    def finish(self) -> None:
        """Drop the gradients, and let every rank have the updated weights."""


class PlainSync:
    """Every rank has all gradients, added up after backward one by one."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the decoder's own parameters."""
        return self.spread.decoder.named_parameters()

    def begin(self) -> None:
        """Do nothing."""

    def last(self, chunk: int) -> None:
        """Do nothing."""

    def gradients(self) -> dict[str, Tensor]:
        """Add up and return the gradients."""
        sum_parts(self.spread)
        sum_replicas(self.spread)
        return self._held()

    def norm(self) -> GradientNorm:
        """Return the norm of the whole model's gradients."""
        return global_norm(self.spread, self._held())

    def finish(self) -> None:
        """Drop the gradients."""
        for parameter in self.spread.decoder.parameters():
            parameter.grad = None

    def _held(self) -> dict[str, Tensor]:
        named = self.spread.decoder.named_parameters()
        return {name: each.grad for name, each in named if each.grad is not None}


def make_sync(spread: Spread) -> Sync:
    """Return how a layout keeps its replicas equal."""
    return PlainSync(spread)
