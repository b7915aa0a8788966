"""`RankCritic`: the critic of PPO, where ranks hold it together as they hold the policy.

It lies as the policy does, with a row of values on the ranks that have the model's end.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.run.nn.holding import Holding
from meshwright.run.parallel.sync import make_sync
from meshwright.run.posttrain.loop.answers import Rows
from meshwright.run.posttrain.loop.critic import UNUSED
from meshwright.run.posttrain.loop.judging import value_loss
from meshwright.run.posttrain.loop.prepare import Part
from meshwright.run.posttrain.loop.ranks.passes import RankModel
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.objectives import averaging
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.placed_state import State, placed_state

_ROW, _SHIFT = "value.weight", "value.bias"


class RankCritic:
    """This rank's part of a model that says what answers will come to."""

    def __init__(self, model: RankModel, settings: LoopSettings) -> None:
        """Begin with a copy of the policy; all values are 0 at first."""
        self._model, self._settings, spread = model, settings, model.spread
        decoder, layout, device = spread.decoder, spread.mesh.layout, spread.mesh.device
        self._row = nn.Parameter(torch.zeros(decoder.model.hidden, device=device))
        self._shift = nn.Parameter(torch.zeros(1, device=device))
        learning: dict[str, nn.Parameter] = {}
        for name, each in decoder.named_parameters():
            # What says words gets no gradient.
            each.requires_grad_(not name.startswith(UNUSED))
            if each.requires_grad:
                learning[name] = each
        held, used_with = {}, {}
        if hasattr(decoder, "head"):
            mirrored = "mirror" if layout.schedule == "dualpipe" else ""
            for name, one in ((_ROW, self._row), (_SHIFT, self._shift)):
                # Every rank reads the vectors of all tokens, so that its gradient is whole.
                held[name] = replace(Holding.all_of(tuple(one.shape)), stages=mirrored)
                learning[name], used_with[name] = one, "head.weight"
        self._sync = make_sync(spread.training(learning, held, used_with))
        self._optimizer = make_optimizer(
            self._sync.named_parameters(),
            layout,
            settings.critic_rule,
            total_steps=settings.updates,
            seed=settings.seed,
        )

    def values(self, every: Sequence[Rows], owners: Sequence[int]) -> list[Tensor]:
        """Return the values before each token of all microbatches."""
        return self._model.read(every, owners, lambda x_BTD, _: self._read(x_BTD))

    def learn(self, update: int, parts: Sequence[Part], of: averaging.Totals) -> float:
        """Learn from the microbatches of this replica; return the loss that this rank tells of."""
        clip, seen = self._settings.critic.clip, 0.0

        def judges(x_BTD: Tensor, part: Part) -> Tensor:
            nonlocal seen
            loss = value_loss(part, self._read(x_BTD), of=of, clip=clip)
            if self._model.speaks:
                seen += float(loss.detach())
            return loss

        self._sync.begin()
        self._model.train(parts, judges, self._sync.last)
        gradients = self._sync.gradients()
        lr = self._optimizer.learning_rate(update)
        self._optimizer.step(lr, norm=self._sync.norm(), gradients=gradients)
        self._sync.finish()
        return seen

    def tensors(self) -> dict[str, State]:
        """Return what this rank has of all that a run needs to go on."""
        found = placed_state(self._sync, self._optimizer)
        return {f"critic.{name}": each for name, each in found.items()}

    def loaded(self) -> None:
        """Let all ranks have what was read from a checkpoint."""
        self._sync.finish()

    def _read(self, x_BTD: Tensor) -> Tensor:
        decoder = self._model.spread.decoder
        # The head's part of a step begins and ends here, as where words are said.
        return decoder.read_head(lambda: x_BTD.float() @ self._row + self._shift)
