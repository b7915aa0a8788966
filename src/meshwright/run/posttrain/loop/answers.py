"""Rollouts as padded rows that a trainer computes, a microbatch at a time.

Shapes: B rows, T positions; a position says how likely the token after it was.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.posttrain.objectives.tokens import Tokens, padded
from meshwright.run.posttrain.rollouts.record import Rollout


class Rows(NamedTuple):
    """A microbatch of answers."""

    own: Tensor
    """int64 [B]: which of the step's answers each row is."""
    tokens: Tensor
    """int64 [B, T]; padded behind, where nobody looks."""
    targets: Tensor
    """int64 [B, T]: the token after each, `IGNORED` where the model did not draw it."""
    sampled: Tensor
    """float32 [B, T]: the engine's log-probabilities of the targets."""
    counted: Tokens


def microbatches(
    answers: Sequence[Rollout],
    chosen: Sequence[int],
    most_tokens: int,
    device: torch.device,
) -> Iterator[Rows]:
    """Cut the chosen answers into microbatches of rows that are about as long."""
    lengths = {at: len(answers[at].tokens) - 1 for at in chosen}
    part: list[int] = []
    for at in sorted(chosen, key=lambda each: (lengths[each], each)):
        if part and (len(part) + 1) * lengths[at] > most_tokens:
            yield _rows(answers, part, device)
            part = []
        part.append(at)
    if part:
        yield _rows(answers, part, device)


def _rows(answers: Sequence[Rollout], part: Sequence[int], device: torch.device) -> Rows:
    # The last of a part is its longest.
    shape = (len(part), len(answers[part[-1]].tokens) - 1)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    sampled = np.zeros(shape, np.float32)
    for row, at in enumerate(part):
        answer = answers[at]
        ids = np.array(answer.tokens)
        drawn = np.array(answer.loss_mask[1:])
        many = len(drawn)
        tokens[row, :many] = ids[:-1]
        targets[row, :many] = np.where(drawn, ids[1:], IGNORED)
        sampled[row, :many] = answer.logprobs[1:]
    tokens_BT, targets_BT, sampled_BT = (
        torch.from_numpy(each).to(device) for each in (tokens, targets, sampled)
    )
    own_B = torch.tensor(part, device=device)
    return Rows(own_B, tokens_BT, targets_BT, sampled_BT, padded(targets_BT != IGNORED))
