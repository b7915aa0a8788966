"""The loss on held-out text: the same sequences every time, nothing trained.

Data-parallel replicas take turns with its batches; the figure is the same whatever the layout.
"""

import math
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.data.batch_dataset import BatchDataset


class EvalStep(Protocol):
    """Knows what a batch costs."""

    @property
    def replica(self) -> tuple[int, int]:
        """Which replica this is, of how many that run at the same time."""

    def evaluate(self, batch: TrainBatch) -> Tensor:
        """Return this rank's share of the summed loss of a batch: cross-entropy in nats, mostly."""

    def discard_eval_stats(self) -> None:
        """Discard the last evaluation's statistics."""

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return what the loss of a batch is divided by: its trained tokens, mostly."""

    def eval_mode(self) -> AbstractContextManager[None]:
        """Evaluate within, without training."""

    def reduce_eval(self, nats: Tensor, tokens: int) -> Tensor:
        """Add up shares over all ranks and tokens over replicas; return both sums, float64."""


@torch.no_grad()
def compute_eval_loss(
    step: EvalStep, batches: BatchDataset, *, sequences: int, device: torch.device
) -> float:
    """Return the mean loss over the first held-out sequences: of a token in nats, mostly.

    They are no more than the text has, and the same whatever the size of a batch.
    """
    count, each = min(sequences, batches.num_sequences), batches.shape.local_batch
    index, replicas = step.replica
    nats, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    with step.eval_mode():
        for turn in range(0, -(-count // each), replicas):
            # In the last turn some may have none left. They run another's, as replicas may share
            # experts and have to meet, and it does not count.
            counts = (turn + index) * each < count
            number = turn + index if counts else turn
            # The last batch may reach beyond what was asked for.
            batch = batches.get_batch(number).split_microbatches(min(each, count - number * each))[
                0
            ]
            found = step.evaluate(batch.to(device))
            if counts:
                nats += found
                tokens += step.loss_divisor(batch)
            else:
                step.discard_eval_stats()
    sums = step.reduce_eval(nats, tokens)
    return float(sums[0] / sums[1]) if sums[1] else math.nan
