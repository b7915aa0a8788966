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
from meshwright.run.posttrain.loop.answers import Rows, microbatches
from meshwright.run.posttrain.loop.critic import Critic
from meshwright.run.posttrain.loop.judging import Gaps, judged, value_loss
from meshwright.run.posttrain.loop.prepare import Asked, Models, Part, prepared
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.objectives import advantages, averaging
from meshwright.run.posttrain.objectives.decoded import decoder_logprobs
from meshwright.run.posttrain.objectives.signals import PolicySignals, reward_signals
from meshwright.run.posttrain.rollouts.generate import Group
from meshwright.run.posttrain.rollouts.record import Rollout, part_means
from meshwright.run.train.optimizer.optimizer import Optimizer

_SHUFFLED, _DEALT = 1, 2
"""What chance is used for, in seeds."""


class Learned(NamedTuple):
    """What a step came to."""

    figures: dict[str, float]
    sentence: str
    """What is wrong with its rewards, in words; empty where nothing is."""


class PolicyStep:
    """Trains a decoder, one step of rollouts after another."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        settings: LoopSettings,
        *,
        longest: int,
        reference: Decoder | Asked | None = None,
        critic: Critic | None = None,
    ) -> None:
        """Train on answers of at most `longest` tokens; KL is taken to the `reference`.

        A `critic` learns beside the policy, where advantages are taken to its values.
        """
        self.decoder, self.optimizer = decoder, optimizer
        self._settings, self._longest = settings, longest
        self._device = next(decoder.parameters()).device
        margin = settings.objective.overlong_margin
        if margin is not None and margin > longest:
            what = f"{margin} tokens are more than the {longest} that an answer may have"
            raise InputError([Problem("objective.overlong_margin", what, "use fewer")])
        self._reference, self._critic = reference, critic

    def __call__(self, step: int, groups: Sequence[Group]) -> Learned:
        """Train on the groups of a step, counted from 0."""
        began_s = time.perf_counter()
        answers = [each for each in chain(*groups) if each.is_judged and each.drawn]
        if not answers:
            what = f"none of {sum(map(len, groups))} answers of step {step + 1} was judged"
            raise InputError([Problem("verifiers", what, "look at the reasons in the rollouts")])
        told = torch.tensor(self._rewards(step, answers), device=self._device)
        penalty = self._penalties(answers)
        rewards = told if penalty is None else told + penalty
        number = {key: at for at, key in enumerate(dict.fromkeys(map(_group, answers)))}
        group = torch.tensor([number[_group(each)] for each in answers], device=self._device)
        given, signals = reward_signals(told, group), reward_signals(rewards, group)
        figures = self._update(step, answers, rewards, group)
        seconds = time.perf_counter() - began_s
        tokens = sum(len(each.tokens) for each in answers)
        figures |= {
            "reward_mean": given.mean,
            "reward_std": given.std,
            **part_means(answers),
            "groups": signals.groups,
            "silent_groups": signals.silent,
            "train_s": seconds,
            "trainer_tokens_per_s": tokens / seconds,
        }
        if penalty is not None:
            figures["penalty_mean"] = float(penalty.mean())
        return Learned(figures | answer_figures(step, groups), signals.sentence())

    def _rewards(self, step: int, answers: Sequence[Rollout]) -> list[float]:
        rewards = [each.reward for each in answers]
        if self._settings.shuffle_rewards:
            chance = np.random.default_rng((self._settings.seed, step, _SHUFFLED))
            rewards = [rewards[at] for at in chance.permutation(len(rewards))]
        return rewards

    def _penalties(self, answers: Sequence[Rollout]) -> Tensor | None:
        """Return what is added to rewards for length, where that is asked."""
        margin = self._settings.objective.overlong_margin
        if margin is None:
            return None
        drawn = torch.tensor([each.drawn for each in answers], device=self._device)
        return advantages.overlong_penalty(drawn, longest=self._longest, margin=margin)

    def _update(
        self, step: int, answers: Sequence[Rollout], reward_S: Tensor, group_S: Tensor
    ) -> dict[str, float]:
        settings, aim = self._settings, self._settings.objective
        fresh_S = self._fresh(step, answers)
        shares = self._shares(step, len(answers))
        models = Models(self.decoder, self._reference, self._critic)
        rows = [self._rows(answers, share) for share in shares]
        updates, figures = prepared(settings, models, rows, reward_S, group_S)
        gaps, first, later = Gaps(), PolicySignals(), PolicySignals()
        for part in chain(*updates):
            if part.old is not None:
                gaps.add(part.old, part.rows, fresh_S)
        norms, critical = [], list[Tensor]()
        for number, parts in enumerate(updates):
            of = averaging.totals(part.rows.counted for part in parts)
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
            norms.append(self.optimizer.step(lr).norm)
            self.optimizer.zero_grad()
            if self._critic is not None:
                self._critic.step(update)
        norm = float(torch.stack(norms).mean())
        figures |= (first + later).figures() | gaps.figures() | {"grad_norm": norm, "lr": lr}
        if critical:
            figures["value_loss"] = float(torch.stack(critical).sum()) / len(updates)
        return figures | {"entropy": first.figures().get("entropy", math.nan)}

    def _fresh(self, step: int, answers: Sequence[Rollout]) -> Tensor:
        """Return which answers were drawn by the weights that the step begins with, bool [S]."""
        fresh = [set(each.versions) == {step} for each in answers]
        return torch.tensor(fresh, device=self._device)

    def _shares(self, step: int, answers: int) -> list[list[int]]:
        """Return the answers of each update, dealt by chance where there are several."""
        count, order = self._settings.objective.minibatches, list(range(answers))
        if count > 1:
            chance = np.random.default_rng((self._settings.seed, step, _DEALT))
            order = chance.permutation(answers).tolist()
        return [part.tolist() for part in np.array_split(order, count) if len(part)]

    def _rows(self, answers: Sequence[Rollout], share: Sequence[int]) -> list[Rows]:
        most = self._settings.microbatch_tokens
        return list(microbatches(answers, share, most, self._device))

    def _backward(
        self, part: Part, *, of: averaging.Totals, gaps: Gaps | None, fresh_S: Tensor
    ) -> PolicySignals:
        """Add a microbatch's gradients; `gaps` is given where the weights are not updated yet."""
        aim, rows = self._settings.objective, part.rows
        hidden = self.decoder.hidden(rows.tokens)
        logp, entropy = decoder_logprobs(
            self.decoder, hidden, rows.targets, entropy=gaps is not None
        )
        if gaps is not None and part.old is None:
            gaps.add(logp, rows, fresh_S)
        loss, signals = judged(aim, part, logp, entropy, of=of, longest=self._longest)
        loss.backward()  # type: ignore[no-untyped-call]
        return signals

    def _criticise(self, part: Part, of: averaging.Totals) -> list[Tensor]:
        """Add the critic's gradients, where there is one, and return its share of the loss."""
        if self._critic is None:
            return []
        value = self._critic(part.rows.tokens)
        loss = value_loss(part, value, of=of, clip=self._settings.critic.clip)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.detach()]


def _group(answer: Rollout) -> tuple[int, int]:
    return answer.key.step, answer.key.prompt


def answer_figures(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """Return lengths, ends, staleness and failed verdicts of a step's answers."""
    every = list(chain(*groups))
    drawn = np.array([each.drawn for each in every])
    stale = np.array([step - each.versions[0] for each in every if each.versions] or [0])
    failed = [part for each in every for part in each.rewards if part.outcome != "ok"]
    return {
        "answers": float(len(every)),
        "length_mean": float(drawn.mean()),
        "length_p95": float(np.percentile(drawn, 95)),
        "length_max": float(drawn.max()),
        "truncated_share": sum(each.ending == "length" for each in every) / len(every),
        "staleness_mean": float(stale.mean()),
        "staleness_max": float(stale.max()),
        "unjudged": float(sum(not each.is_judged for each in every)),
        "verifier_timeouts": float(sum(part.outcome == "time-out" for part in failed)),
    }
