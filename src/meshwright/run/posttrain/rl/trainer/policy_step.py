"""`PolicyStep`: one step of training on judged rollouts, and what a person needs to see of it.

A step is one or more updates, each on its share of the answers. Advantages are those of the whole
step, and each update's loss is a sum over the tokens of its share. Ratios are taken to the
log-probabilities that the engine told when it drew: nothing pretends that answers are the present
policy's own.
"""

import math
import time
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.objectives import group_advantages, loss_weights
from meshwright.run.posttrain.objectives.decoder_logprobs import compute_decoder_logprobs
from meshwright.run.posttrain.objectives.step_metrics import PolicyMetrics, compute_reward_metrics
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.trainer.critic import Critic
from meshwright.run.posttrain.rl.trainer.microbatch_loss import (
    LogprobGap,
    compute_policy_loss,
    compute_value_loss,
)
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch, build_microbatches
from meshwright.run.posttrain.rl.trainer.step_preparation import (
    BatchEvaluator,
    StepModels,
    TrainingMicrobatch,
    prepare_step,
)
from meshwright.run.posttrain.rollout.generator import RolloutGroup
from meshwright.run.posttrain.rollout.rollout import Rollout, average_reward_components
from meshwright.run.train.optimizer.optimizer import Optimizer

_SHUFFLED, _DEALT = 1, 2
"""What chance is used for, in seeds."""


class PolicyStepResult(NamedTuple):
    """What a step came to."""

    metrics: dict[str, float]
    signal_warning: str
    """What is wrong with its rewards, in words; empty where nothing is."""


class PolicyStep:
    """Trains a decoder, one step of rollouts after another."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        settings: RLConfig,
        *,
        longest: int,
        reference: Decoder | BatchEvaluator | None = None,
        critic: Critic | None = None,
    ) -> None:
        """Train on answers of at most `longest` tokens; KL is taken to the `reference`.

        A `critic` learns beside the policy, where advantages are taken to its values.
        """
        self.decoder, self.optimizer = decoder, optimizer
        self._settings, self._longest = settings, longest
        self._device = next(decoder.parameters()).device
        margin = settings.objective.overlong_buffer
        if margin is not None and margin > longest:
            what = f"{margin} tokens are more than the {longest} that an answer may have"
            raise InputError([Problem("objective.overlong_buffer", what, "use fewer")])
        self._reference, self._critic = reference, critic

    def __call__(self, step: int, groups: Sequence[RolloutGroup]) -> PolicyStepResult:
        """Train on the groups of a step, counted from 0."""
        began_s = time.perf_counter()
        answers = [each for each in chain(*groups) if each.has_reward and each.sampled_token_count]
        if not answers:
            what = f"none of {sum(map(len, groups))} answers of step {step + 1} was judged"
            raise InputError([Problem("verifiers", what, "look at the reasons in the rollouts")])
        told = torch.tensor(self._rewards(step, answers), device=self._device)
        penalty = self._penalties(answers)
        rewards = told if penalty is None else told + penalty
        number = {key: at for at, key in enumerate(dict.fromkeys(map(_group, answers)))}
        group = torch.tensor([number[_group(each)] for each in answers], device=self._device)
        given, signals = compute_reward_metrics(told, group), compute_reward_metrics(rewards, group)
        figures = self._update(step, answers, rewards, group)
        seconds = time.perf_counter() - began_s
        tokens = sum(len(each.tokens) for each in answers)
        figures |= {
            "reward_mean": given.mean,
            "reward_std": given.std,
            **average_reward_components(answers),
            "groups": signals.groups,
            "groups_without_signal": signals.groups_without_signal,
            "train_s": seconds,
            "trainer_tokens_per_s": tokens / seconds,
        }
        if penalty is not None:
            figures["penalty_mean"] = float(penalty.mean())
        return PolicyStepResult(
            figures | compute_completion_metrics(step, groups), signals.signal_warning()
        )

    def _rewards(self, step: int, rollouts: Sequence[Rollout]) -> list[float]:
        rewards = [each.reward for each in rollouts]
        if self._settings.shuffle_rewards:
            chance = np.random.default_rng((self._settings.seed, step, _SHUFFLED))
            rewards = [rewards[at] for at in chance.permutation(len(rewards))]
        return rewards

    def _penalties(self, rollouts: Sequence[Rollout]) -> Tensor | None:
        """Return what is added to rewards for length, where that is asked."""
        margin = self._settings.objective.overlong_buffer
        if margin is None:
            return None
        drawn = torch.tensor([each.sampled_token_count for each in rollouts], device=self._device)
        return group_advantages.overlong_penalty(drawn, longest=self._longest, margin=margin)

    def _update(
        self, step: int, rollouts: Sequence[Rollout], reward_S: Tensor, group_S: Tensor
    ) -> dict[str, float]:
        settings, aim = self._settings, self._settings.objective
        fresh_S = self._fresh(step, rollouts)
        shares = self._shares(step, len(rollouts))
        models = StepModels(self.decoder, self._reference, self._critic)
        rows = [self._rows(rollouts, share) for share in shares]
        updates, figures = prepare_step(settings, models, rows, reward_S, group_S)
        gaps, first, later = LogprobGap(), PolicyMetrics(), PolicyMetrics()
        for part in chain(*updates):
            if part.old_logprobs is not None:
                gaps.add(part.old_logprobs, part.microbatch, fresh_S)
        norms, critical = [], list[Tensor]()
        for number, parts in enumerate(updates):
            of = loss_weights.sum_step_totals(part.microbatch.loss_tokens for part in parts)
            for part in parts:
                # Entropy and gaps are those of the weights that the step began with.
                own = gaps if number == 0 else None
                seen = self._backward(part, of=of, gaps=own, fresh_S=fresh_S)
                if number == 0:
                    first += seen
                else:
                    later += seen
                critical += self._criticise(part, of)
            update = step * aim.minibatches + number
            lr = self.optimizer.learning_rate(update)
            norms.append(self.optimizer.step(lr).grad_norm)
            self.optimizer.zero_grad()
            if self._critic is not None:
                self._critic.step(update)
        norm = float(torch.stack(norms).mean())
        figures |= (first + later).to_dict() | gaps.to_dict() | {"grad_norm": norm, "lr": lr}
        if critical:
            figures["value_loss"] = float(torch.stack(critical).sum()) / len(updates)
        return figures | {"entropy": first.to_dict().get("entropy", math.nan)}

    def _fresh(self, step: int, rollouts: Sequence[Rollout]) -> Tensor:
        """Return which answers were drawn by the weights that the step begins with, bool [S]."""
        fresh = [set(each.versions) == {step} for each in rollouts]
        return torch.tensor(fresh, device=self._device)

    def _shares(self, step: int, answers: int) -> list[list[int]]:
        """Return the answers of each update, dealt by chance where there are several."""
        count, order = self._settings.objective.minibatches, list(range(answers))
        if count > 1:
            chance = np.random.default_rng((self._settings.seed, step, _DEALT))
            order = chance.permutation(answers).tolist()
        return [part.tolist() for part in np.array_split(order, count) if len(part)]

    def _rows(self, rollouts: Sequence[Rollout], share: Sequence[int]) -> list[RolloutMicrobatch]:
        most = self._settings.microbatch_tokens
        return list(build_microbatches(rollouts, share, most, self._device))

    def _backward(
        self,
        part: TrainingMicrobatch,
        *,
        of: loss_weights.StepTotals,
        gaps: LogprobGap | None,
        fresh_S: Tensor,
    ) -> PolicyMetrics:
        """Add a microbatch's gradients; `gaps` is given where the weights are not updated yet."""
        aim, rows = self._settings.objective, part.microbatch
        hidden = self.decoder.compute_hidden_states(rows.input_ids)
        logp, entropy = compute_decoder_logprobs(
            self.decoder, hidden, rows.targets, entropy=gaps is not None
        )
        if gaps is not None and part.old_logprobs is None:
            gaps.add(logp, rows, fresh_S)
        loss, signals = compute_policy_loss(aim, part, logp, entropy, of=of, longest=self._longest)
        loss.backward()  # type: ignore[no-untyped-call]
        return signals

    def _criticise(self, part: TrainingMicrobatch, of: loss_weights.StepTotals) -> list[Tensor]:
        """Add the critic's gradients, where there is one, and return its share of the loss."""
        if self._critic is None:
            return []
        value = self._critic(part.microbatch.input_ids)
        loss = compute_value_loss(part, value, of=of, clip=self._settings.critic.clip)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.detach()]


def _group(rollout: Rollout) -> tuple[int, int]:
    return rollout.key.step, rollout.key.prompt


def compute_completion_metrics(step: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return lengths, ends, staleness and failed verdicts of a step's answers."""
    every = list(chain(*groups))
    drawn = np.array([each.sampled_token_count for each in every])
    stale = np.array([step - each.versions[0] for each in every if each.versions] or [0])
    failed = [part for each in every for part in each.rewards if part.outcome != "ok"]
    return {
        "answers": float(len(every)),
        "length_mean": float(drawn.mean()),
        "length_p95": float(np.percentile(drawn, 95)),
        "length_max": float(drawn.max()),
        "truncated_fraction": sum(each.ending == "length" for each in every) / len(every),
        "staleness_mean": float(stale.mean()),
        "staleness_max": float(stale.max()),
        "unscored": float(sum(not each.has_reward for each in every)),
        "verifier_timeouts": float(sum(part.outcome == "timeout" for part in failed)),
    }
