"""`ShardedPolicyModel`: a model that ranks hold together, as passes over rollouts see it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.run.nn.decoder import BatchLoss
from meshwright.run.parallel.forward_backward import ForwardBackwardRunner
from meshwright.run.parallel.microbatch import HeadLoss, Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.objectives.decoder_logprobs import compute_decoder_logprobs
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch
from meshwright.run.posttrain.rl.trainer.step_preparation import TrainingMicrobatch
from meshwright.run.posttrain.supervised.recipe_objective import gather_sequence_outputs

OutputReader = Callable[[Tensor, RolloutMicrobatch], Tensor]
"""Returns a number of every token of a microbatch from what the output head reads."""
LossFunction = Callable[[Tensor, TrainingMicrobatch], Tensor]
"""Returns the loss of a microbatch from the same."""


class ShardedPolicyModel:
    """This rank's part of a model, and the passes that all ranks run together."""

    def __init__(self, sharded_model: ShardedModel) -> None:
        self.spread, self.mesh, self.runner = (
            sharded_model,
            sharded_model.mesh,
            ForwardBackwardRunner(sharded_model),
        )

    @property
    def reports_metrics(self) -> bool:
        """Whether this is the one of the ranks with the same rows whose figures count."""
        return self.mesh.coordinate.tp == self.mesh.coordinate.cp == 0

    def compute_logprobs(
        self, every: Sequence[RolloutMicrobatch], owners: Sequence[int]
    ) -> list[Tensor]:
        """Return the log-probabilities of all microbatches, those of other replicas included."""

        def said(x_BTD: Tensor, rows: RolloutMicrobatch) -> Tensor:
            return compute_decoder_logprobs(self.spread.decoder, x_BTD, rows.targets)[0]

        return self.map_outputs(every, owners, said)

    @torch.no_grad()
    def map_outputs(
        self, every: Sequence[RolloutMicrobatch], owners: Sequence[int], reads: OutputReader
    ) -> list[Tensor]:
        """Return what is read of all microbatches.

        Each replica computes its own, and all of them the same number.
        """
        device = self.mesh.device
        found = [torch.zeros(rows.targets.shape, device=device) for rows in every]
        for rows, owner, room in zip(every, owners, found, strict=True):
            if owner == self.mesh.coordinate.dp:
                self._evaluate(rows, room, reads)
        flat = torch.cat([each.flatten() for each in found])
        # Noughts but of the stage with the head, and of the replica that computed them.
        flat = self.mesh["dp"].all_reduce(self.mesh["pp"].all_reduce(flat))
        parts = torch.split(flat, [each.numel() for each in found])
        return [part.view(each.shape) for part, each in zip(parts, found, strict=True)]

    def forward_backward(
        self,
        parts: Sequence[TrainingMicrobatch],
        judges: LossFunction,
        on_last: Callable[[int], None],
    ) -> None:
        """Run microbatches forward and backward; gradients are left for the replicas to add up."""
        ranks = self.mesh.layout.cp

        def judge(x_BTD: Tensor, microbatch: Microbatch) -> BatchLoss:
            part = microbatch.source
            assert isinstance(part, TrainingMicrobatch)
            # Ranks that share the tokens all judge all of them, and add up what they find.
            loss = judges(gather_sequence_outputs(self.spread, x_BTD), part) / ranks
            return BatchLoss(loss, part.microbatch.loss_tokens.mask.sum(), torch.zeros_like(loss))

        given = [
            self.build_microbatch(part.microbatch.input_ids, part.microbatch.targets, part)
            for part in parts
        ]
        with self._judged_by(judge):
            self.runner(given, 1.0, on_last)

    def build_microbatch(
        self, tokens_BT: Tensor, labels_BT: Tensor, source: object = None
    ) -> Microbatch:
        """Return what passes need of padded rows."""
        model, length, positions = self.spread.decoder.model, tokens_BT.shape[1], None
        if model.positions == "learned" and model.max_positions and length > model.max_positions:
            # What only makes a length divide has no place of its own in the table.
            places = torch.arange(length, device=tokens_BT.device)
            positions = places.clamp(max=model.max_positions - 1)[None]
        return Microbatch(tokens_BT, labels_BT, positions, source=source)

    def _evaluate(self, rows: RolloutMicrobatch, room: Tensor, reads: OutputReader) -> None:
        def collect(x_BTD: Tensor, _: Microbatch) -> BatchLoss:
            room.copy_(reads(gather_sequence_outputs(self.spread, x_BTD), rows))
            nothing = torch.zeros((), device=room.device)
            return BatchLoss(nothing, nothing.long(), nothing)

        with self._judged_by(collect):
            self.runner.evaluate(self.build_microbatch(rows.input_ids, rows.targets))

    @contextmanager
    def _judged_by(self, judge: HeadLoss) -> Iterator[None]:
        stage = self.spread.pipeline_stage
        before, stage.head_loss = stage.head_loss, judge
        try:
            yield
        finally:
            stage.head_loss = before
