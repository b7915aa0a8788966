"""What a step knows of its answers before it changes anything: above all, their advantages."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.objectives import group_advantages, token_advantages
from meshwright.run.posttrain.objectives.decoder_logprobs import compute_decoder_logprobs
from meshwright.run.posttrain.objectives.kl_penalty import estimate_kl
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.trainer.critic import Critic
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch

_OF_GROUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "z-scored": group_advantages.normalized_advantages,
    "centred": group_advantages.centered_advantages,
    "leave-one-out": group_advantages.rloo_advantages,
    "centred-whitened": group_advantages.centered_advantages,
}


class TrainingMicrobatch(NamedTuple):
    """A microbatch, with what was computed of it by the weights that the step began with.

    All are of tokens, [B, T].
    """

    microbatch: RolloutMicrobatch
    advantages: Tensor
    old_logprobs: Tensor | None
    """The trainer's log-probabilities, where ratios are not taken to the engine's."""
    ref_logprobs: Tensor | None
    """Those of the first weights, where KL counts."""
    values: Tensor | None
    """The critic's."""
    returns: Tensor | None
    """What the critic shall learn."""


@torch.no_grad()
def compute_policy_logprobs(decoder: Decoder, rows: RolloutMicrobatch) -> Tensor:
    """Return the log-probabilities of what was drawn, without gradients."""
    return compute_decoder_logprobs(
        decoder, decoder.compute_hidden_states(rows.input_ids), rows.targets
    )[0]


BatchEvaluator = Callable[[Sequence[RolloutMicrobatch]], list[Tensor]]
"""Returns the log-probabilities, or values, of every microbatch, by a model that ranks share."""


class StepModels(NamedTuple):
    """Who is asked before a step."""

    policy: Decoder | BatchEvaluator
    reference: Decoder | BatchEvaluator | None
    critic: Critic | BatchEvaluator | None


class PreparedStep(NamedTuple):
    """All microbatches of a step, update by update."""

    updates: list[list[TrainingMicrobatch]]
    metrics: dict[str, float]


def prepare_step(
    settings: RLConfig,
    models: StepModels,
    updates: Sequence[Sequence[RolloutMicrobatch]],
    reward_S: Tensor,
    group_S: Tensor,
) -> PreparedStep:
    """Return the parts of a step from its rows, rewards and groups."""
    aim = settings.objective
    every = [rows for update in updates for rows in update]
    off = aim.kl_coef > 0 and aim.kl_in == "reward"
    policy = reference = taken = None
    if aim.importance_correction != "none" or off:
        policy = _said(models.policy, every)
    if models.reference is not None:
        reference = _said(models.reference, every)
    if off:
        assert policy is not None, "computed for it"
        assert reference is not None, "kl has one"
        taken = [
            rows.loss_tokens.zero_masked(
                aim.kl_coef * estimate_kl(mine, first, aim.resolved_kl_estimator)
            )
            for rows, mine, first in zip(every, policy, reference, strict=True)
        ]
    figures: dict[str, float] = {}
    value = wanted = None
    if models.critic is not None:
        value = _valued(models.critic, every)
        found, wanted, figures = _with_critic(settings, every, reward_S, taken, value)
    elif aim.adv_estimator == "whitened":
        coming = _coming(every, reward_S, taken, aim.gamma)
        found = _whitened(every, coming)
    else:
        whole_S = reward_S if taken is None else _less(every, reward_S, taken)
        advantage_S = _OF_GROUPS[aim.adv_estimator](whole_S, group_S)
        found = [
            rows.loss_tokens.broadcast_to_tokens(advantage_S[rows.rollout_indices])
            for rows in every
        ]
        if aim.adv_estimator == "centred-whitened":
            found = _whitened(every, found)
    old = policy if aim.importance_correction != "none" else None
    columns = (found, old, reference, value, wanted)
    parts = (
        TrainingMicrobatch(rows, *(None if each is None else each[at] for each in columns))  # type: ignore[arg-type]
        for at, rows in enumerate(every)
    )
    return PreparedStep([[next(parts) for _ in update] for update in updates], figures)


def _said(model: Decoder | BatchEvaluator, every: Sequence[RolloutMicrobatch]) -> list[Tensor]:
    if isinstance(model, Decoder):
        return [compute_policy_logprobs(model, rows) for rows in every]
    return model(every)


@torch.no_grad()
def _valued(critic: Critic | BatchEvaluator, every: Sequence[RolloutMicrobatch]) -> list[Tensor]:
    if isinstance(critic, Critic):
        found = [critic(rows.input_ids) for rows in every]
    else:
        found = critic(every)
    return [rows.loss_tokens.zero_masked(one) for rows, one in zip(every, found, strict=True)]


def _with_critic(
    settings: RLConfig,
    every: Sequence[RolloutMicrobatch],
    reward_S: Tensor,
    taken: Sequence[Tensor] | None,
    value: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """Return advantages, what the critic shall learn, and how right it was."""
    gamma, gae_lambda = settings.objective.gamma, settings.critic.gae_lambda
    rewards = _rewards(every, reward_S, taken)
    both = [
        token_advantages.gae_advantages(
            reward, one, rows.loss_tokens, gamma=gamma, gae_lambda=gae_lambda
        )
        for rows, reward, one in zip(every, rewards, value, strict=True)
    ]
    # Held against what did come, and not against targets that the critic had a hand in.
    coming = _coming(every, reward_S, taken, gamma)
    missed = [came - one for came, one in zip(coming, value, strict=True)]
    whole, rest = (_moments(every, each) for each in (coming, missed))
    figures = {"value_mean": _moments(every, value).mean}
    if whole.variance > 0:
        figures["explained_variance"] = 1 - rest.variance / whole.variance
    return _whitened(every, [one for one, _ in both]), [one for _, one in both], figures


def _rewards(
    every: Sequence[RolloutMicrobatch], reward_S: Tensor, taken: Sequence[Tensor] | None
) -> list[Tensor]:
    """Return rewards of tokens: the answer's at its end, less what is taken off each."""
    found = [
        token_advantages.terminal_rewards(reward_S[rows.rollout_indices], rows.loss_tokens)
        for rows in every
    ]
    if taken is None:
        return found
    return [reward - off for reward, off in zip(found, taken, strict=True)]


def _coming(
    every: Sequence[RolloutMicrobatch],
    reward_S: Tensor,
    taken: Sequence[Tensor] | None,
    gamma: float,
) -> list[Tensor]:
    """Return what came after each token."""
    rewards = _rewards(every, reward_S, taken)
    return [
        token_advantages.discounted_returns(reward, rows.loss_tokens, gamma=gamma)
        for rows, reward in zip(every, rewards, strict=True)
    ]


def _less(every: Sequence[RolloutMicrobatch], reward_S: Tensor, taken: Sequence[Tensor]) -> Tensor:
    """Return rewards of answers, less what is taken off their tokens."""
    found = reward_S.clone()
    for rows, off in zip(every, taken, strict=True):
        found[rows.rollout_indices] -= rows.loss_tokens.sum_per_sequence(off)
    return found


def _whitened(every: Sequence[RolloutMicrobatch], value: Sequence[Tensor]) -> list[Tensor]:
    of = _moments(every, value)
    return [
        token_advantages.whiten(one, rows.loss_tokens, of)
        for rows, one in zip(every, value, strict=True)
    ]


def _moments(
    every: Sequence[RolloutMicrobatch], value: Iterable[Tensor]
) -> token_advantages.WhiteningMoments:
    return reduce(
        add,
        (
            token_advantages.compute_whitening_stats(one, rows.loss_tokens)
            for rows, one in zip(every, value, strict=True)
        ),
    )
