"""`RankStep`: one step of training on judged rollouts, by a model that ranks hold together.

Every rank has all answers of the step: it deals them out as the others do, knows the totals that
losses are divided by, and computes the advantages of all. Passes alone are shared.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from meshwright.run.parallel.order_check import OrderCheck
from meshwright.run.parallel.sync import Sync
from meshwright.run.posttrain.loop.judging import Gaps, judged
from meshwright.run.posttrain.loop.policy_step import PolicyStep
from meshwright.run.posttrain.loop.prepare import Models, Part, prepared
from meshwright.run.posttrain.loop.ranks.critic import RankCritic
from meshwright.run.posttrain.loop.ranks.dealing import counts, deal
from meshwright.run.posttrain.loop.ranks.orders import told_by_all
from meshwright.run.posttrain.loop.ranks.passes import RankModel
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.objectives import averaging
from meshwright.run.posttrain.objectives.decoded import decoder_logprobs
from meshwright.run.posttrain.objectives.signals import PolicySignals
from meshwright.run.posttrain.rollouts.record import Rollout
from meshwright.run.train.optimizer.optimizer import Optimizer


class _Seen(NamedTuple):
    """What a rank saw of its answers."""

    first: PolicySignals
    """By the weights that the step began with."""
    later: PolicySignals
    gaps: tuple[float, float, int]
    value_loss: float = 0.0
    """Its share of the critic's loss, over all updates."""


class RankStep(PolicyStep):
    """Trains this rank's part of a model, together with all other ranks."""

    def __init__(
        self,
        model: RankModel,
        sync: Sync,
        optimizer: Optimizer,
        settings: LoopSettings,
        *,
        longest: int,
        reference: RankModel | None = None,
        critic: RankCritic | None = None,
    ) -> None:
        """Train on answers of at most `longest` tokens; KL is taken to the `reference`.

        A `critic` learns beside the policy, where advantages are taken to its values.
        """
        super().__init__(model.spread.decoder, optimizer, settings, longest=longest)
        self._device = model.mesh.device
        self._model, self._sync, self._first, self._values = model, sync, reference, critic
        self._same_order = OrderCheck(model.mesh)

    def _update(
        self, step: int, answers: Sequence[Rollout], reward_S: Tensor, group_S: Tensor
    ) -> dict[str, float]:
        settings, aim, mesh = self._settings, self._settings.objective, self._model.mesh
        fresh_S = self._fresh(step, answers)
        most = settings.microbatch_tokens
        dealt = [
            deal(answers, share, mesh.layout, most_tokens=most, device=self._device)
            for share in self._shares(step, len(answers))
        ]
        owners = [owner for each in dealt for owner in each.owners]
        reference = None if self._first is None else partial(self._first.logprobs, owners=owners)
        values = None if self._values is None else partial(self._values.values, owners=owners)
        models = Models(partial(self._model.logprobs, owners=owners), reference, values)
        updates, figures = prepared(
            settings, models, [each.rows for each in dealt], reward_S, group_S
        )
        gaps, first, later, norms = Gaps(), PolicySignals(), PolicySignals(), list[Tensor]()
        critical = 0.0
        for number, (parts, each) in enumerate(zip(updates, dealt, strict=True)):
            of = averaging.totals(part.rows.counted for part in parts if counts(part.rows))
            mine = [
                part
                for part, owner in zip(parts, each.owners, strict=True)
                if owner == mesh.place.dp
            ]
            # Gaps and entropies are those of the weights that the step began with.
            for part in mine:
                if part.old is not None and self._is_mine:
                    gaps.add(part.old, part.rows, fresh_S)
            own = gaps if number == 0 else None
            signals = self._gradients(mine, of=of, gaps=own, fresh_S=fresh_S)
            first, later = (first + signals, later) if number == 0 else (first, later + signals)
            update = step * aim.minibatches + number
            lr = self.optimizer.learning_rate(update)
            norms.append(self._apply(lr))
            if self._values is not None:
                critical += self._values.learn(update, mine, of)
        self._same_order()
        seen = _Seen(first, later, (gaps.total, gaps.most, gaps.count), critical / len(updates))
        figures |= self._put_together(seen)
        norm = float(torch.stack(norms).mean())
        return figures | {"grad_norm": norm, "lr": lr}

    @property
    def _is_mine(self) -> bool:
        """Whether this rank tells of what all ranks of its replica know."""
        return self._model.speaks and self._model.mesh.place.pp == 0

    def _gradients(
        self,
        parts: Sequence[Part],
        *,
        of: averaging.Totals,
        gaps: Gaps | None,
        fresh_S: Tensor,
    ) -> PolicySignals:
        """Run the microbatches of this replica; `gaps` is given while weights are as they were."""
        aim, seen = self._settings.objective, [PolicySignals()]

        def judges(x_BTD: Tensor, part: Part) -> Tensor:
            logp, entropy = decoder_logprobs(
                self.decoder, x_BTD, part.rows.targets, entropy=gaps is not None
            )
            if gaps is not None and part.old is None and self._model.speaks:
                gaps.add(logp, part.rows, fresh_S)
            loss, signals = judged(aim, part, logp, entropy, of=of, longest=self._longest)
            if self._model.speaks:
                seen.append(signals)
            return loss

        self._sync.begin()
        self._model.train(parts, judges, self._sync.last)
        return sum(seen[1:], start=seen[0])

    def _apply(self, lr: float) -> Tensor:
        """Update the weights by the gradients of all ranks, and return their norm."""
        gradients = self._sync.gradients()
        report = self.optimizer.step(lr, norm=self._sync.norm(), gradients=gradients)
        self._sync.finish()
        return report.norm

    def _put_together(self, seen: _Seen) -> dict[str, float]:
        mesh, said = self._model.mesh, msgspec.msgpack.encode(seen)
        told = told_by_all(mesh.world, said, mesh.device)
        every = [msgspec.msgpack.decode(each, type=_Seen) for each in told]
        first = sum((each.first for each in every), start=PolicySignals())
        later = sum((each.later for each in every), start=PolicySignals())
        gaps = sum((Gaps(*each.gaps) for each in every), start=Gaps())
        figures = (first + later).figures() | gaps.figures()
        if self._values is not None:
            figures["value_loss"] = sum(each.value_loss for each in every)
        return figures | {"entropy": first.figures().get("entropy", float("nan"))}
