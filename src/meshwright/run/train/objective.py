"""`Objective`: what of a model is trained, and what a step minimises.

A loss is a sum over a microbatch; what it is divided by is counted over the whole step, so that
microbatches of unequal weight add up to one batch. `NextTokenObjective` trains every weight on the
next token of text; post-training has learners of other kinds.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.train.data.batch import TrainBatch

AllReduceFn = Callable[[Tensor], Tensor]
"""Adds a tensor up over all replicas."""


class Objective(Protocol):
    """What is trained, and how a microbatch is judged."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained."""

    def select_trainable(self, sharded_model: ShardedModel) -> ShardedModel:
        """Return this rank's part of a model with what is trained, where ranks share the model."""

    def checkpoint_name(self, name: str) -> str:
        """Return what a parameter that is trained is called in checkpoints."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs, beside the optimizer's own: not copies."""

    def train(self, mode: bool) -> None:
        """Train from here on, or only evaluate."""

    def set_replicas(self, together: AllReduceFn, replica: int) -> None:
        """Know that there are other replicas, which this is, and how sums over all are made."""

    def begin_step(self, batch: TrainBatch) -> None:
        """See a whole step, or a batch to evaluate, before its microbatches come."""

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return what the summed loss of a batch is divided by, without asking the device."""

    def loss(self, part: TrainBatch) -> BatchLoss:
        """Return the summed loss of a microbatch."""

    def discard_metrics(self) -> None:
        """Discard the metrics of the last microbatch."""

    def pop_metrics(self) -> Mapping[str, Tensor]:
        """Return what was seen since this was last asked, as means on the device."""

    def save_final(self, folder: Path, *, speaks: bool = True) -> None:
        """Write what a finished run leaves beside its checkpoints; one rank speaks for all."""


class NextTokenObjective:
    """Every weight of a decoder, trained on the next token."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through all parameters."""
        return self.decoder.named_parameters()

    def select_trainable(self, sharded_model: ShardedModel) -> ShardedModel:
        """Train the decoder's own parameters."""
        return sharded_model

    def checkpoint_name(self, name: str) -> str:
        """Name a weight of the model."""
        return f"model.{name}"

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the decoder."""
        return {f"model.{name}": value for name, value in self.decoder.state_dict().items()}

    def train(self, mode: bool) -> None:
        """Set the decoder's mode."""
        self.decoder.train(mode)

    def set_replicas(self, together: AllReduceFn, replica: int) -> None:
        """Leave sums to the step."""

    def begin_step(self, batch: TrainBatch) -> None:
        """Need nothing of a step beforehand."""

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return the trained tokens."""
        return batch.num_targets

    def loss(self, part: TrainBatch) -> BatchLoss:
        """Return the cross-entropy of the next tokens."""
        return self.decoder.loss(
            part.tokens_BT,
            part.labels_BT,
            positions=part.positions_BT,
            documents=part.documents,
        )

    def discard_metrics(self) -> None:
        """Have seen nothing."""

    def pop_metrics(self) -> Mapping[str, Tensor]:
        """Return nothing beside the loss."""
        return {}

    def save_final(self, folder: Path, *, speaks: bool = True) -> None:
        """Leave the checkpoints alone."""
