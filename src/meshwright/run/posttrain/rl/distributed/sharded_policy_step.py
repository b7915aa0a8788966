"""`ShardedPolicyStep`: one training step on scored rollouts, with a sharded model.

Every rank has all answers of the step: it deals them out as the others do, knows the totals that
losses are divided by, and computes the advantages of all. Passes alone are shared.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from meshwright.run.parallel.health.collective_order import CollectiveOrderCheck
from meshwright.run.parallel.zero.gradient_sync import Sync
from meshwright.run.posttrain.objectives import loss_weights
from meshwright.run.posttrain.objectives.decoder_logprobs import compute_decoder_logprobs
from meshwright.run.posttrain.objectives.step_metrics import PolicyMetrics
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.distributed.commands import gather_bytes
from meshwright.run.posttrain.rl.distributed.microbatch_assignment import (
    assign_microbatches,
    has_loss_tokens,
)
from meshwright.run.posttrain.rl.distributed.sharded_critic import ShardedCritic
from meshwright.run.posttrain.rl.distributed.sharded_model import ShardedPolicyModel
from meshwright.run.posttrain.rl.trainer.microbatch_loss import LogprobGap, compute_policy_loss
from meshwright.run.posttrain.rl.trainer.policy_step import PolicyStep
from meshwright.run.posttrain.rl.trainer.step_preparation import (
    StepModels,
    TrainingMicrobatch,
    prepare_step,
)
from meshwright.run.posttrain.rollout.rollout import Rollout
from meshwright.run.train.optimizer.optimizer import Optimizer


class _Seen(NamedTuple):
    """What a rank saw of its answers."""

    first: PolicyMetrics
    """By the weights that the step began with."""
    later: PolicyMetrics
    gaps: tuple[float, float, int]
    value_loss: float = 0.0
    """Its share of the critic's loss, over all updates."""


class ShardedPolicyStep(PolicyStep):
    """Trains this rank's part of a model, together with all other ranks."""

    def __init__(
        self,
        model: ShardedPolicyModel,
        sync: Sync,
        optimizer: Optimizer,
        settings: RLConfig,
        *,
        longest: int,
        reference: ShardedPolicyModel | None = None,
        critic: ShardedCritic | None = None,
    ) -> None:
        """Train on answers of at most `longest` tokens; KL is taken to the `reference`.

        A `critic` learns beside the policy, where advantages are taken to its values.
        """
        super().__init__(model.spread.decoder, optimizer, settings, longest=longest)
        self._device = model.mesh.device
        self._model, self._sync, self._first, self._values = model, sync, reference, critic
        self._same_order = CollectiveOrderCheck(model.mesh)

    def _update(
        self, step: int, rollouts: Sequence[Rollout], reward_S: Tensor, group_S: Tensor
    ) -> dict[str, float]:
        settings, aim, mesh = self._settings, self._settings.objective, self._model.mesh
        fresh_S = self._fresh(step, rollouts)
        most = settings.microbatch_tokens
        dealt = [
            assign_microbatches(rollouts, share, mesh.layout, most_tokens=most, device=self._device)
            for share in self._shares(step, len(rollouts))
        ]
        owners = [owner for each in dealt for owner in each.replica_ids]
        reference = (
            None if self._first is None else partial(self._first.compute_logprobs, owners=owners)
        )
        values = (
            None if self._values is None else partial(self._values.compute_values, owners=owners)
        )
        models = StepModels(partial(self._model.compute_logprobs, owners=owners), reference, values)
        updates, figures = prepare_step(
            settings, models, [each.microbatches for each in dealt], reward_S, group_S
        )
        gaps, first, later, norms = LogprobGap(), PolicyMetrics(), PolicyMetrics(), list[Tensor]()
        critical = 0.0
        for number, (parts, each) in enumerate(zip(updates, dealt, strict=True)):
            of = loss_weights.sum_step_totals(
                part.microbatch.loss_tokens for part in parts if has_loss_tokens(part.microbatch)
            )
            mine = [
                part
                for part, owner in zip(parts, each.replica_ids, strict=True)
                if owner == mesh.coordinate.dp
            ]
            # Gaps and entropies are those of the weights that the step began with.
            for part in mine:
                if part.old_logprobs is not None and self._is_mine:
                    gaps.add(part.old_logprobs, part.microbatch, fresh_S)
            own = gaps if number == 0 else None
            signals = self._gradients(mine, of=of, gaps=own, fresh_S=fresh_S)
            first, later = (first + signals, later) if number == 0 else (first, later + signals)
            update = step * aim.minibatches + number
            lr = self.optimizer.learning_rate(update)
            norms.append(self._apply(lr))
            if self._values is not None:
                critical += self._values.train_step(update, mine, of)
        self._same_order()
        seen = _Seen(first, later, (gaps.sum, gaps.max, gaps.count), critical / len(updates))
        figures |= self._put_together(seen)
        norm = float(torch.stack(norms).mean())
        return figures | {"grad_norm": norm, "lr": lr}

    @property
    def _is_mine(self) -> bool:
        """Whether this rank tells of what all ranks of its replica know."""
        return self._model.reports_metrics and self._model.mesh.coordinate.pp == 0

    def _gradients(
        self,
        parts: Sequence[TrainingMicrobatch],
        *,
        of: loss_weights.StepTotals,
        gaps: LogprobGap | None,
        fresh_S: Tensor,
    ) -> PolicyMetrics:
        """Run the microbatches of this replica; `gaps` is given while weights are as they were."""
        aim, seen = self._settings.objective, [PolicyMetrics()]

        def judges(x_BTD: Tensor, part: TrainingMicrobatch) -> Tensor:
            logp, entropy = compute_decoder_logprobs(
                self.decoder, x_BTD, part.microbatch.targets, entropy=gaps is not None
            )
            if gaps is not None and part.old_logprobs is None and self._model.reports_metrics:
                gaps.add(logp, part.microbatch, fresh_S)
            loss, signals = compute_policy_loss(
                aim, part, logp, entropy, of=of, longest=self._longest
            )
            if self._model.reports_metrics:
                seen.append(signals)
            return loss

        self._sync.begin_step()
        self._model.forward_backward(parts, judges, self._sync.mark_last_backward)
        return sum(seen[1:], start=seen[0])

    def _apply(self, lr: float) -> Tensor:
        """Update the weights by the gradients of all ranks, and return their norm."""
        gradients = self._sync.reduced_gradients()
        report = self.optimizer.step(lr, norm=self._sync.grad_norm(), gradients=gradients)
        self._sync.zero_grads_and_unshard()
        return report.grad_norm

    def _put_together(self, seen: _Seen) -> dict[str, float]:
        mesh, said = self._model.mesh, msgspec.msgpack.encode(seen)
        told = gather_bytes(mesh.world, said, mesh.device)
        every = [msgspec.msgpack.decode(each, type=_Seen) for each in told]
        first = sum((each.first for each in every), start=PolicyMetrics())
        later = sum((each.later for each in every), start=PolicyMetrics())
        gaps = sum((LogprobGap(*each.gaps) for each in every), start=LogprobGap())
        figures = (first + later).to_dict() | gaps.to_dict()
        if self._values is not None:
            figures["value_loss"] = sum(each.value_loss for each in every)
        return figures | {"entropy": first.to_dict().get("entropy", float("nan"))}
