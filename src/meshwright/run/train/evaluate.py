"""The loss on held-out text: the same sequences every time, nothing trained."""

import math
from typing import Protocol

import torch
from torch import Tensor

from meshwright.run.nn.decoder import Decoder
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.data.batches import Batches


class Evaluates(Protocol):
    """Knows what a batch costs."""

    @property
    def decoder(self) -> Decoder:
        """The model, or the part of it that is here."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of a batch, in nats."""


@torch.no_grad()
def held_out_loss(
    step: Evaluates, batches: Batches, *, sequences: int, device: torch.device
) -> float:
    """Return the mean cross-entropy of a token over the first held-out sequences, in nats.

    They are no more than the text has, and the same whatever the size of a batch.
    """
    count, each = min(sequences, batches.sequences), batches.shape.batch
    nats, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    was_training = step.decoder.training
    step.decoder.eval()
    try:
        for number, first in enumerate(range(0, count, each)):
            # The last batch may reach beyond what was asked for.
            batch = batches.at(number).split(min(each, count - first))[0]
            nats += step.evaluate(batch.to(device))
            tokens += batch.targets
    finally:
        step.decoder.train(was_training)
    return float(nats) / tokens if tokens else math.nan
