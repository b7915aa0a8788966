"""Advantages of whole answers [S] over others to the same prompt, and what groups tell.

`group` [S] says which prompt an answer belongs to, by any integers; groups may differ in size and
lie in any order, but must be whole. A group whose rewards are all the same has advantages of
exactly 0. All is computed in float64, where squares of no reward overflow, and returned as rewards
are given.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem


class GroupStats(NamedTuple):
    """Rewards as groups see them, each figure spread over the answers, [S], in float64."""

    size: Tensor
    mean: Tensor
    std: Tensor
    """Standard deviation of a sample (n - 1), as verl's and TRL's; 0 for one answer alone."""
    all_equal: Tensor
    """bool: all rewards of the group are the same, so that it carries no signal."""


def compute_group_stats(reward_S: Tensor, group_S: Tensor) -> GroupStats:
    """Return the figures of every answer's group."""
    reward_S = reward_S.double()
    if reward_S.dim() != 1 or reward_S.shape != group_S.shape:
        what = f"rewards {tuple(reward_S.shape)} and groups {tuple(group_S.shape)} do not fit"
        raise InputError([Problem("advantages", what, "give one reward and one group per answer")])
    if not bool(torch.isfinite(reward_S).all()):
        bad = int((~torch.isfinite(reward_S)).nonzero()[0])
        fix = "have the verifier return a finite number, and drop answers it could not judge"
        raise InputError([Problem(f"rewards[{bad}]", f"is {reward_S[bad].item()}", fix)])
    known, own = torch.unique(group_S, return_inverse=True)
    zeros = reward_S.new_zeros(len(known))
    size = zeros.index_add(0, own, torch.ones_like(reward_S))
    mean = zeros.index_add(0, own, reward_S) / size
    square = zeros.index_add(0, own, (reward_S - mean[own]).square())
    most = zeros.scatter_reduce(0, own, reward_S, "amax", include_self=False)
    least = zeros.scatter_reduce(0, own, reward_S, "amin", include_self=False)
    equal = (most == least)[own]
    spread = (square / (size - 1).clamp(min=1)).sqrt()[own]
    return GroupStats(size[own], mean[own], spread.masked_fill(equal, 0), equal)


def centered_advantages(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Return r - mean of the group (Dr. GRPO, arXiv 2503.20783 §3.2)."""
    known = compute_group_stats(reward_S, group_S)
    return (reward_S - known.mean).masked_fill(known.all_equal, 0).to(reward_S.dtype)


def normalized_advantages(reward_S: Tensor, group_S: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Return (r - mean) / (standard deviation + epsilon) (GRPO, arXiv 2402.03300 §4.1.2)."""
    known = compute_group_stats(reward_S, group_S)
    found = ((reward_S - known.mean) / (known.std + epsilon)).masked_fill(known.all_equal, 0)
    return found.to(reward_S.dtype)


def rloo_advantages(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Return r - mean of the group's other answers (RLOO, arXiv 2402.14740).

    An answer without others has nothing to be compared with, and gets 0.
    """
    known = compute_group_stats(reward_S, group_S)
    factor = known.size / (known.size - 1).clamp(min=1)
    return ((reward_S - known.mean) * factor).masked_fill(known.all_equal, 0).to(reward_S.dtype)


def has_signal(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Say which answers belong to groups that carry a signal, [S] bool.

    DAPO's dynamic sampling keeps these and samples further prompts until a batch is full
    (arXiv 2503.14476 Eq. 11).
    """
    return ~compute_group_stats(reward_S, group_S).all_equal


def overlong_penalty(length_S: Tensor, *, longest: int, margin: int) -> Tensor:
    """Return what is added to the rewards of answers that come near the longest allowed.

    0 up to `longest - margin` tokens, falling to -1 at `longest`, -1 beyond (DAPO,
    arXiv 2503.14476 Eq. 13).
    """
    if not 0 < margin <= longest:
        what = f"margin is {margin}, longest {longest}"
        raise InputError([Problem("overlong_penalty", what, "give 0 < margin <= longest")])
    wide = length_S.to(torch.get_default_dtype())
    return ((longest - margin - wide) / margin).clamp(min=-1.0, max=0.0)
