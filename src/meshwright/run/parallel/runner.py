"""`Runner`: a rank's part in the forward and backward passes of one step, whatever the layout.

Each microbatch is cut to this rank's tokens, then runs through the rank's chunks: one after the
other where there is one stage, in the order of the layout's schedule where there are several.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.decoder import Loss
from meshwright.run.parallel.context import cut
from meshwright.run.parallel.pipeline import Pipeline
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.stage import Microbatch


class Sums(NamedTuple):
    """What this rank's share of the tokens costs; noughts on ranks that see no loss."""

    nats: Tensor
    """fp32 scalar: cross-entropy, summed."""
    auxiliary: Tensor
    """fp32 scalar: what training adds to it, summed."""


LastBackward = Callable[[int], None]
"""Told the position of a chunk whose gradients are complete after the backward that follows."""


class Runner:
    """Runs microbatches forward and backward; gradients are left at the parameters."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.pipeline = Pipeline(spread) if spread.mesh.layout.pp > 1 else None
        """Runs the schedule where there are several stages."""

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        share: float | Tensor,
        on_last: LastBackward | None = None,
    ) -> Sums:
        """Run all microbatches of a step, each loss multiplied by `share` before backward."""
        microbatches = cut(microbatches, self.spread)
        if self.pipeline is not None:
            return Sums(*self.pipeline(microbatches, share, on_last))
        losses, recorder = [], self.spread.mesh.recorder
        for number, microbatch in enumerate(microbatches):
            loss = self._forward(microbatch, number)
            if on_last is not None and number == len(microbatches) - 1:
                on_last(0)
            start = perf_counter()
            (loss.total * share).backward()  # type: ignore[no-untyped-call]
            if recorder is not None:
                recorder.passed("B", self.spread.stage.chunks[0], number, perf_counter() - start)
            losses.append((loss.nats_sum.detach(), loss.auxiliary.detach()))
        nats, auxiliary = (torch.stack(column).sum() for column in zip(*losses, strict=True))
        return Sums(nats, auxiliary)

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch) -> Sums:
        """Run a microbatch forward alone."""
        (microbatch,) = cut([microbatch], self.spread)
        if self.pipeline is not None:
            return Sums(*self.pipeline.evaluate([microbatch]))
        loss = self._forward(microbatch, 0)
        return Sums(loss.nats_sum, loss.auxiliary)

    def _forward(self, microbatch: Microbatch, number: int) -> Loss:
        """Run a microbatch through the one stage there is."""
        start, recorder = perf_counter(), self.spread.mesh.recorder
        loss = self.spread.stage.forward(0, microbatch, None)
        assert isinstance(loss, Loss), "one stage has the head"
        if recorder is not None:
            recorder.passed("F", self.spread.stage.chunks[0], number, perf_counter() - start)
        return loss
