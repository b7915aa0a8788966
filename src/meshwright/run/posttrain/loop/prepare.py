"""What a step knows of its answers before it changes anything: above all, their advantages."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.loop.answers import Rows
from meshwright.run.posttrain.loop.critic import Critic
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.objectives import advantages, returns
from meshwright.run.posttrain.objectives.decoded import decoder_logprobs
from meshwright.run.posttrain.objectives.divergence import divergence

_OF_GROUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "z-scored": advantages.z_scored,
    "centred": advantages.centred,
    "leave-one-out": advantages.leave_one_out,
    "centred-whitened": advantages.centred,
}


class Part(NamedTuple):
    """A microbatch, with what was computed of it by the weights that the step began with.

    All are of tokens, [B, T].
    """

    rows: Rows
    advantage: Tensor
    old: Tensor | None
    """The trainer's log-probabilities, where ratios are not taken to the engine's."""
    reference: Tensor | None
    """Those of the first weights, where KL counts."""
    value: Tensor | None
    """The critic's."""
    wanted: Tensor | None
    """What the critic shall learn."""


@torch.no_grad()
def logprobs(decoder: Decoder, rows: Rows) -> Tensor:
    """Return the log-probabilities of what was drawn, without gradients."""
    return decoder_logprobs(decoder, decoder.hidden(rows.tokens), rows.targets)[0]


Asked = Callable[[Sequence[Rows]], list[Tensor]]
"""Returns the log-probabilities, or values, of every microbatch, by a model that ranks share."""


class Models(NamedTuple):
    """Who is asked before a step."""

    policy: Decoder | Asked
    reference: Decoder | Asked | None
    critic: Critic | Asked | None


class Prepared(NamedTuple):
    """All microbatches of a step, update by update."""

    updates: list[list[Part]]
    figures: dict[str, float]


def prepared(
    settings: LoopSettings,
    models: Models,
    updates: Sequence[Sequence[Rows]],
    reward_S: Tensor,
    group_S: Tensor,
) -> Prepared:
    """Return the parts of a step from its rows, rewards and groups."""
    aim = settings.objective
    every = [rows for update in updates for rows in update]
    off = aim.kl > 0 and aim.kl_in == "reward"
    policy = reference = taken = None
    if aim.correction != "none" or off:
        policy = _said(models.policy, every)
    if models.reference is not None:
        reference = _said(models.reference, every)
    if off:
        assert policy is not None, "computed for it"
        assert reference is not None, "kl has one"
        taken = [
            rows.counted.clean(aim.kl * divergence(mine, first, aim.estimator))
            for rows, mine, first in zip(every, policy, reference, strict=True)
        ]
    figures: dict[str, float] = {}
    value = wanted = None
    if models.critic is not None:
        value = _valued(models.critic, every)
        found, wanted, figures = _with_critic(settings, every, reward_S, taken, value)
    elif aim.advantage == "whitened":
        coming = _coming(every, reward_S, taken, aim.discount)
        found = _whitened(every, coming)
    else:
        whole_S = reward_S if taken is None else _less(every, reward_S, taken)
        advantage_S = _OF_GROUPS[aim.advantage](whole_S, group_S)
        found = [rows.counted.spread(advantage_S[rows.own]) for rows in every]
        if aim.advantage == "centred-whitened":
            found = _whitened(every, found)
    old = policy if aim.correction != "none" else None
    columns = (found, old, reference, value, wanted)
    parts = (
        Part(rows, *(None if each is None else each[at] for each in columns))  # type: ignore[arg-type]
        for at, rows in enumerate(every)
    )
    return Prepared([[next(parts) for _ in update] for update in updates], figures)


def _said(model: Decoder | Asked, every: Sequence[Rows]) -> list[Tensor]:
    if isinstance(model, Decoder):
        return [logprobs(model, rows) for rows in every]
    return model(every)


@torch.no_grad()
def _valued(critic: Critic | Asked, every: Sequence[Rows]) -> list[Tensor]:
    if isinstance(critic, Critic):
        found = [critic(rows.tokens) for rows in every]
    else:
        found = critic(every)
    return [rows.counted.clean(one) for rows, one in zip(every, found, strict=True)]


def _with_critic(
    settings: LoopSettings,
    every: Sequence[Rows],
    reward_S: Tensor,
    taken: Sequence[Tensor] | None,
    value: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """Return advantages, what the critic shall learn, and how right it was."""
    discount, decay = settings.objective.discount, settings.critic.decay
    rewards = _rewards(every, reward_S, taken)
    both = [
        returns.generalised(reward, one, rows.counted, discount=discount, decay=decay)
        for rows, reward, one in zip(every, rewards, value, strict=True)
    ]
    # Held against what did come, and not against targets that the critic had a hand in.
    coming = _coming(every, reward_S, taken, discount)
    missed = [came - one for came, one in zip(coming, value, strict=True)]
    whole, rest = (_moments(every, each) for each in (coming, missed))
    figures = {"value_mean": _moments(every, value).mean}
    if whole.variance > 0:
        figures["explained_variance"] = 1 - rest.variance / whole.variance
    return _whitened(every, [one for one, _ in both]), [one for _, one in both], figures


def _rewards(
    every: Sequence[Rows], reward_S: Tensor, taken: Sequence[Tensor] | None
) -> list[Tensor]:
    """Return rewards of tokens: the answer's at its end, less what is taken off each."""
    found = [returns.at_last_token(reward_S[rows.own], rows.counted) for rows in every]
    if taken is None:
        return found
    return [reward - off for reward, off in zip(found, taken, strict=True)]


def _coming(
    every: Sequence[Rows], reward_S: Tensor, taken: Sequence[Tensor] | None, discount: float
) -> list[Tensor]:
    """Return what came after each token."""
    rewards = _rewards(every, reward_S, taken)
    return [
        returns.discounted(reward, rows.counted, discount=discount)
        for rows, reward in zip(every, rewards, strict=True)
    ]


def _less(every: Sequence[Rows], reward_S: Tensor, taken: Sequence[Tensor]) -> Tensor:
    """Return rewards of answers, less what is taken off their tokens."""
    found = reward_S.clone()
    for rows, off in zip(every, taken, strict=True):
        found[rows.own] -= rows.counted.sums(off)
    return found


def _whitened(every: Sequence[Rows], value: Sequence[Tensor]) -> list[Tensor]:
    of = _moments(every, value)
    return [returns.whiten(one, rows.counted, of) for rows, one in zip(every, value, strict=True)]


def _moments(every: Sequence[Rows], value: Iterable[Tensor]) -> returns.Moments:
    return reduce(
        add, (returns.moments(one, rows.counted) for rows, one in zip(every, value, strict=True))
    )
