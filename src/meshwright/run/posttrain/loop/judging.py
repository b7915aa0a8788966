"""What a microbatch costs a policy, from its log-probabilities, and what people see of it.

Losses are sums of weighted tokens, and weights hold the totals of the whole update: however it was
cut into microbatches and dealt to ranks, all of them simply add up.
"""

from typing import NamedTuple

from torch import Tensor

from meshwright.run.posttrain.loop.answers import Rows
from meshwright.run.posttrain.loop.objective import ObjectiveSettings
from meshwright.run.posttrain.loop.prepare import Part
from meshwright.run.posttrain.objectives import averaging, mismatch, policy, returns
from meshwright.run.posttrain.objectives.divergence import divergence, in_loss
from meshwright.run.posttrain.objectives.signals import PolicySignals, policy_signals
from meshwright.run.posttrain.objectives.tokens import Tokens


class Judged(NamedTuple):
    """What became of a microbatch."""

    loss: Tensor
    """What is differentiated: a share of the update's."""
    signals: PolicySignals


def judged(
    aim: ObjectiveSettings,
    part: Part,
    logp: Tensor,
    entropy: Tensor | None,
    *,
    of: averaging.Totals,
    longest: int,
) -> Judged:
    """Return what a microbatch of an update costs; `logp` and `entropy` are of its tokens."""
    rows, tokens = part.rows, part.rows.counted
    old = rows.sampled if part.old is None else part.old
    loss = _policy_loss(aim, logp, old, tokens, part.advantage)
    losses, apart = loss.losses, None
    if part.reference is not None:
        if aim.kl_in == "loss":
            losses = losses + _pull(aim, logp, part.reference, old, tokens)
        apart = divergence(logp.detach(), part.reference)
    weight = averaging.weights(tokens, of, aim.averaging, longest=longest)
    correction = None
    if part.old is not None:
        correction = _correction(aim, part.old, rows)
        weight = weight * correction
    total = averaging.weighted_sum(losses, weight)
    seen = None if entropy is None else entropy.detach()
    return Judged(
        total, policy_signals(loss, tokens, divergence=apart, entropy=seen, mismatch=correction)
    )


def value_loss(part: Part, value: Tensor, *, of: averaging.Totals, clip: float | None) -> Tensor:
    """Return a microbatch's share of what a critic minimises; `value` is what it says now."""
    assert part.wanted is not None, "a step with a critic says what it shall learn"
    tokens = part.rows.counted
    losses = returns.value_loss(tokens.clean(value), part.wanted, before=part.value, clip=clip)
    return averaging.weighted_sum(losses, averaging.weights(tokens, of))


class Gaps:
    """|Δ log p| of engine and trainer, over tokens that the present weights drew."""

    def __init__(self, total: float = 0.0, most: float = 0.0, count: int = 0) -> None:
        self.total, self.most, self.count = total, most, count

    def add(self, logp: Tensor, rows: Rows, fresh_S: Tensor) -> None:
        """Add those of a microbatch; `fresh_S` tells which answers the present weights drew."""
        mask = rows.counted.mask & fresh_S[rows.own][:, None]
        gap = (logp.detach() - rows.sampled).abs()[mask].double()
        if gap.numel():
            self.total += float(gap.sum())
            self.most = max(self.most, float(gap.max()))
            self.count += gap.numel()

    def __add__(self, other: "Gaps") -> "Gaps":
        most = max(self.most, other.most)
        return Gaps(self.total + other.total, most, self.count + other.count)

    def figures(self) -> dict[str, float]:
        """Return the mean and the largest; nothing where there is none."""
        if not self.count:
            return {}
        return {"logp_gap_mean": self.total / self.count, "logp_gap_max": self.most}


def _policy_loss(
    aim: ObjectiveSettings, logp: Tensor, old: Tensor, tokens: Tokens, advantage: Tensor
) -> policy.PolicyLoss:
    low, high = aim.ratio_bounds
    if aim.loss == "reinforce":
        return policy.reinforce(logp, advantage, tokens)
    if aim.loss == "cispo":
        return policy.cispo(logp, old, advantage, tokens, low=low, high=high)
    level: policy.Level = "sequence" if aim.loss == "gspo" else "token"
    most = aim.dual_clip
    return policy.clipped(logp, old, advantage, tokens, low=low, high=high, level=level, most=most)


def _pull(
    aim: ObjectiveSettings, logp: Tensor, reference: Tensor, old: Tensor, tokens: Tokens
) -> Tensor:
    """Return what KL to the reference adds to the losses of tokens."""
    ratio = policy.log_ratio(logp, old, tokens).exp() if aim.kl_weighted else None
    return in_loss(logp, reference, strength=aim.kl, kind=aim.estimator, ratio=ratio)


def _correction(aim: ObjectiveSettings, old: Tensor, rows: Rows) -> Tensor:
    most, span = aim.correction_most, aim.correction_span
    if aim.correction == "truncated":
        return mismatch.truncated(old, rows.sampled, rows.counted, most=most, span=span)
    least = 1 / most
    return mismatch.masked(old, rows.sampled, rows.counted, least=least, most=most, span=span)
