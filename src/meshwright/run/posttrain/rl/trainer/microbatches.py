"""Rollouts as padded rows that a trainer computes, a microbatch at a time.

Shapes: B rows, T positions; a position says how likely the token after it was.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens, padded_tokens
from meshwright.run.posttrain.rollout.rollout import Rollout


class RolloutMicrobatch(NamedTuple):
    """A microbatch of answers."""

    rollout_indices: Tensor
    """int64 [B]: which of the step's answers each row is."""
    input_ids: Tensor
    """int64 [B, T]; padded behind, where nobody looks."""
    targets: Tensor
    """int64 [B, T]: the token after each, `IGNORE_INDEX` where the model did not draw it."""
    sampler_logprobs: Tensor
    """float32 [B, T]: the engine's log-probabilities of the targets."""
    loss_tokens: MaskedTokens


def build_microbatches(
    rollouts: Sequence[Rollout],
    chosen: Sequence[int],
    most_tokens: int,
    device: torch.device,
) -> Iterator[RolloutMicrobatch]:
    """Cut the chosen answers into microbatches of rows that are about as long."""
    lengths = {at: len(rollouts[at].tokens) - 1 for at in chosen}
    part: list[int] = []
    for at in sorted(chosen, key=lambda each: (lengths[each], each)):
        if part and (len(part) + 1) * lengths[at] > most_tokens:
            yield _rows(rollouts, part, device)
            part = []
        part.append(at)
    if part:
        yield _rows(rollouts, part, device)


def _rows(
    rollouts: Sequence[Rollout], part: Sequence[int], device: torch.device
) -> RolloutMicrobatch:
    # The last of a part is its longest.
    shape = (len(part), len(rollouts[part[-1]].tokens) - 1)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    sampled = np.zeros(shape, np.float32)
    for row, at in enumerate(part):
        answer = rollouts[at]
        ids = np.array(answer.tokens)
        drawn = np.array(answer.loss_mask[1:])
        many = len(drawn)
        tokens[row, :many] = ids[:-1]
        targets[row, :many] = np.where(drawn, ids[1:], IGNORE_INDEX)
        sampled[row, :many] = answer.logprobs[1:]
    tokens_BT, targets_BT, sampled_BT = (
        torch.from_numpy(each).to(device) for each in (tokens, targets, sampled)
    )
    own_B = torch.tensor(part, device=device)
    return RolloutMicrobatch(
        own_B, tokens_BT, targets_BT, sampled_BT, padded_tokens(targets_BT != IGNORE_INDEX)
    )
