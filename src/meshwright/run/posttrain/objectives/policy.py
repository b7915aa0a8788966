"""Policy losses of tokens: PPO's clip, GSPO, CISPO and plain REINFORCE.

ρ is π / π_old of a token, or of its whole sequence; A its advantage. All of these return the loss
of every token, to be weighted and summed (`averaging`), and what became of the ratio.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.tokens import Tokens
from meshwright.spec.bounds import require, word

Level = Literal["token", "sequence"]

MOST_LOG_RATIO = 20.0
"""|log ρ| beyond which a token has no gradient: e²⁰ tells that something is wrong, infinity would
ruin the weights. verl bounds it likewise."""


class PolicyLoss(NamedTuple):
    """Losses of tokens, before weights."""

    losses: Tensor
    ratio: Tensor
    """ρ of each token, without gradient; 1 where none counts."""
    clipped: Tensor
    """bool: tokens whose gradient (PPO, GSPO) or weight (CISPO) the bounds took away or cut."""


def log_ratio(logp: Tensor, old: Tensor, tokens: Tokens, level: Level = "token") -> Tensor:
    """Return log ρ of every token.

    "sequence" is the mean over the sequence (GSPO, arXiv 2507.18071 Eq. 7), whose gradient each
    token carries for itself (its Eq. 14, GSPO-token): with the weights of "sequence" averaging and
    one advantage per sequence, value and gradient are those of the sequence's own ratio.
    """
    require(word("level", level, get_args(Level)))
    logp = tokens.clean(logp)
    gap = logp - tokens.clean(old.detach())
    if level == "sequence":
        mean = tokens.spread(tokens.means(gap.detach()))
        gap = tokens.clean(logp - logp.detach() + mean)
    return gap.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def clipped(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: Tokens,
    *,
    low: float = 0.2,
    high: float = 0.2,
    level: Level = "token",
    most: float | None = None,
) -> PolicyLoss:
    """Return -min(ρ · A, clip(ρ, 1 - low, 1 + high) · A) (PPO, arXiv 1707.06347 Eq. 7).

    `high` above `low` is DAPO's clip-higher (arXiv 2503.14476 Eq. 10); `level="sequence"` with
    bounds of some 3e-4 is GSPO. `most` also bounds ρ where A < 0: -min(…) ≤ -most · A (dual clip,
    arXiv 1912.09729).
    """
    _check(low, high)
    ratio = log_ratio(logp, old, tokens, level).exp()
    advantage = tokens.clean(advantage.detach())
    plain = -ratio * advantage
    near = -ratio.clamp(1 - low, 1 + high) * advantage
    losses, cut = torch.maximum(plain, near), near > plain
    if most is not None:
        if most <= 1 + high:
            fix = f"give a number above {1 + high:g}, or None"
            raise InputError([Problem("clipped", f"most is {most}", fix)])
        bound = -most * advantage
        over = (advantage < 0) & (losses > bound)
        losses, cut = torch.where(over, bound, losses), cut | over
    return PolicyLoss(losses, ratio.detach(), cut)


def cispo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: Tokens,
    *,
    low: float = 1.0,
    high: float = 4.0,
) -> PolicyLoss:
    """Return -clip(ρ, 1 - low, 1 + high) · A · log π, the clipped ρ being a mere weight.

    No token loses its gradient (MiniMax-M1, arXiv 2506.13585 Eq. 4 and 5). The paper sets no lower
    bound, which `low` = 1 is.
    """
    _check(low, high, least=1.0)
    ratio = log_ratio(logp, old, tokens).detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    losses = -weight * tokens.clean(advantage.detach()) * tokens.clean(logp)
    return PolicyLoss(losses, ratio, weight != ratio)


def reinforce(logp: Tensor, advantage: Tensor, tokens: Tokens) -> PolicyLoss:
    """Return -A · log π, for tokens of the policy as it is."""
    logp = tokens.clean(logp)
    losses = -tokens.clean(advantage.detach()) * logp
    return PolicyLoss(losses, torch.ones_like(logp).detach(), torch.zeros_like(tokens.mask))


def _check(low: float, high: float, least: float = 1.0 - 1e-9) -> None:
    if not (0 <= low <= least and high >= 0):
        what = f"bounds 1 - {low:g} and 1 + {high:g}"
        fix = "give 0 <= low < 1 (CISPO: <= 1) and high >= 0, as distances from 1"
        raise InputError([Problem("policy", what, fix)])
