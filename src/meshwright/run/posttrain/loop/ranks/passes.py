"""`RankModel`: a model that ranks hold together, as passes over rollouts see it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.run.nn.decoder import Loss
from meshwright.run.parallel.runner import Runner
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.stage import Judge, Microbatch
from meshwright.run.posttrain.loop.answers import Rows
from meshwright.run.posttrain.loop.prepare import Part
from meshwright.run.posttrain.objectives.decoded import decoder_logprobs
from meshwright.run.posttrain.supervised.learner import whole_tokens

Reads = Callable[[Tensor, Rows], Tensor]
"""Returns a number of every token of a microbatch from what the output head reads."""
Judges = Callable[[Tensor, Part], Tensor]
"""Returns the loss of a microbatch from the same."""


class RankModel:
    """This rank's part of a model, and the passes that all ranks run together."""

    def __init__(self, spread: Spread) -> None:
        self.spread, self.mesh, self.runner = spread, spread.mesh, Runner(spread)

    @property
    def speaks(self) -> bool:
        """Whether this is the one of the ranks with the same rows whose figures count."""
        return self.mesh.place.tp == self.mesh.place.cp == 0

    def logprobs(self, every: Sequence[Rows], owners: Sequence[int]) -> list[Tensor]:
        """Return the log-probabilities of all microbatches, those of other replicas included."""

        def said(x_BTD: Tensor, rows: Rows) -> Tensor:
            return decoder_logprobs(self.spread.decoder, x_BTD, rows.targets)[0]

        return self.read(every, owners, said)

    @torch.no_grad()
    def read(self, every: Sequence[Rows], owners: Sequence[int], reads: Reads) -> list[Tensor]:
        """Return what is read of all microbatches.

        Each replica computes its own, and all of them the same number.
        """
        device = self.mesh.device
        found = [torch.zeros(rows.targets.shape, device=device) for rows in every]
        for rows, owner, room in zip(every, owners, found, strict=True):
            if owner == self.mesh.place.dp:
                self._evaluate(rows, room, reads)
        flat = torch.cat([each.flatten() for each in found])
        # Noughts but of the stage with the head, and of the replica that computed them.
        flat = self.mesh["dp"].all_reduce(self.mesh["pp"].all_reduce(flat))
        parts = torch.split(flat, [each.numel() for each in found])
        return [part.view(each.shape) for part, each in zip(parts, found, strict=True)]

    def train(self, parts: Sequence[Part], judges: Judges, on_last: Callable[[int], None]) -> None:
        """Run microbatches forward and backward; gradients are left for the replicas to add up."""
        ranks = self.mesh.layout.cp

        def judge(x_BTD: Tensor, microbatch: Microbatch) -> Loss:
            part = microbatch.source
            assert isinstance(part, Part)
            # Ranks that share the tokens all judge all of them, and add up what they find.
            loss = judges(whole_tokens(self.spread, x_BTD), part) / ranks
            return Loss(loss, part.rows.counted.mask.sum(), torch.zeros_like(loss))

        given = [self.microbatch(part.rows.tokens, part.rows.targets, part) for part in parts]
        with self._judged_by(judge):
            self.runner(given, 1.0, on_last)

    def microbatch(self, tokens_BT: Tensor, labels_BT: Tensor, source: object = None) -> Microbatch:
        """Return what passes need of padded rows."""
        model, length, positions = self.spread.decoder.model, tokens_BT.shape[1], None
        if model.positions == "learned" and model.max_positions and length > model.max_positions:
            # What only makes a length divide has no place of its own in the table.
            places = torch.arange(length, device=tokens_BT.device)
            positions = places.clamp(max=model.max_positions - 1)[None]
        return Microbatch(tokens_BT, labels_BT, positions, source=source)

    def _evaluate(self, rows: Rows, room: Tensor, reads: Reads) -> None:
        def collect(x_BTD: Tensor, _: Microbatch) -> Loss:
            room.copy_(reads(whole_tokens(self.spread, x_BTD), rows))
            nothing = torch.zeros((), device=room.device)
            return Loss(nothing, nothing.long(), nothing)

        with self._judged_by(collect):
            self.runner.evaluate(self.microbatch(rows.tokens, rows.targets))

    @contextmanager
    def _judged_by(self, judge: Judge) -> Iterator[None]:
        stage = self.spread.stage
        before, stage.judge = stage.judge, judge
        try:
            yield
        finally:
            stage.judge = before
