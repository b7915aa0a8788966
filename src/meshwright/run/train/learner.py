"""`Learner`: what of a model is trained, and what a step minimises.

A loss is a sum over a microbatch; what it is divided by is counted over the whole step, so that
microbatches of unequal weight add up to one batch. `NextToken` trains every weight on the next
token of text; post-training has learners of other kinds.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.parallel.spread import Spread
from meshwright.run.train.data.batch import Batch

Together = Callable[[Tensor], Tensor]
"""Adds a tensor up over all replicas."""


class Learner(Protocol):
    """What is trained, and how a microbatch is judged."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained."""

    def trained(self, spread: Spread) -> Spread:
        """Return this rank's part of a model with what is trained, where ranks share the model."""

    def saved_as(self, name: str) -> str:
        """Return what a parameter that is trained is called in checkpoints."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs, beside the optimizer's own: not copies."""

    def train(self, mode: bool) -> None:
        """Train from here on, or only evaluate."""

    def join(self, together: Together, replica: int) -> None:
        """Know that there are other replicas, which this is, and how sums over all are made."""

    def begin(self, batch: Batch) -> None:
        """See a whole step, or a batch to evaluate, before its microbatches come."""

    def count(self, batch: Batch) -> int:
        """Return what the summed loss of a batch is divided by, without asking the device."""

    def loss(self, part: Batch) -> Loss:
        """Return the summed loss of a microbatch."""

    def unsee(self) -> None:
        """Let what the last microbatch told count for nothing in figures."""

    def figures(self) -> Mapping[str, Tensor]:
        """Return what was seen since this was last asked, as means on the device."""

    def ended(self, folder: Path, *, speaks: bool = True) -> None:
        """Write what a finished run leaves beside its checkpoints; one rank speaks for all."""


class NextToken:
    """Every weight of a decoder, trained on the next token."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through all parameters."""
        return self.decoder.named_parameters()

    def trained(self, spread: Spread) -> Spread:
        """Train the decoder's own parameters."""
        return spread

    def saved_as(self, name: str) -> str:
        """Name a weight of the model."""
        return f"model.{name}"

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the decoder."""
        return {f"model.{name}": value for name, value in self.decoder.state_dict().items()}

    def train(self, mode: bool) -> None:
        """Set the decoder's mode."""
        self.decoder.train(mode)

    def join(self, together: Together, replica: int) -> None:
        """Leave sums to the step."""

    def begin(self, batch: Batch) -> None:
        """Need nothing of a step beforehand."""

    def count(self, batch: Batch) -> int:
        """Return the trained tokens."""
        return batch.targets

    def loss(self, part: Batch) -> Loss:
        """Return the cross-entropy of the next tokens."""
        return self.decoder.loss(
            part.tokens_BT,
            part.labels_BT,
            positions=part.positions_BT,
            documents=part.documents,
        )

    def unsee(self) -> None:
        """Have seen nothing."""

    def figures(self) -> Mapping[str, Tensor]:
        """Return nothing beside the loss."""
        return {}

    def ended(self, folder: Path, *, speaks: bool = True) -> None:
        """Leave the checkpoints alone."""
