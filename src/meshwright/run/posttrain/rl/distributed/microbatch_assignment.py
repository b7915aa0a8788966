"""The answers of an update, dealt to the replicas of a layout: each has as many microbatches.

Ranks that gather parameters, trade rows with experts or pass microbatches on meet in every pass, so
a replica that has fewer answers runs rows in which nothing counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.posttrain.objectives.masked_tokens import padded_tokens
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch, build_microbatches
from meshwright.run.posttrain.rollout.rollout import Rollout
from meshwright.spec.layout import Layout


class MicrobatchAssignment(NamedTuple):
    """All microbatches of an update, replica by replica."""

    microbatches: list[RolloutMicrobatch]
    replica_ids: list[int]
    """The replica of each."""


def assign_microbatches(
    rollouts: Sequence[Rollout],
    chosen: Sequence[int],
    layout: Layout,
    *,
    most_tokens: int,
    device: torch.device,
) -> MicrobatchAssignment:
    """Deal the chosen answers out, so that replicas have about as many tokens."""
    lengths = {at: len(rollouts[at].tokens) for at in chosen}
    longest_first = sorted(chosen, key=lambda each: (-lengths[each], each))
    hands: list[list[int]] = [[] for _ in range(layout.dp)]
    for place, at in enumerate(longest_first):
        # There and back again, or the first would get the longest of every round.
        turn, number = divmod(place, layout.dp)
        hands[number if turn % 2 == 0 else -1 - number].append(at)
    cut = [list(build_microbatches(rollouts, hand, most_tokens, device)) for hand in hands]
    count = max(map(len, cut))
    step = get_sequence_divisor(layout)
    rows, owners = list[RolloutMicrobatch](), list[int]()
    for replica, own in enumerate(cut):
        own += [_nothing(device) for _ in range(count - len(own))]
        rows += [pad_sequence_to(each, step) for each in own]
        owners += [replica] * count
    return MicrobatchAssignment(rows, owners)


def get_sequence_divisor(layout: Layout) -> int:
    """Return into how many equal parts ranks cut a sequence: lengths are multiples of it."""
    return (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sequence_parallel else 1)


def pad_sequence_to(rows: RolloutMicrobatch, step: int) -> RolloutMicrobatch:
    """Return rows whose length is a multiple of a number; nothing counts in what is added."""
    more = -rows.input_ids.shape[1] % step
    if not more:
        return rows
    targets = pad(rows.targets, (0, more), value=IGNORE_INDEX)
    sampled = pad(rows.sampler_logprobs, (0, more))
    tokens = pad(rows.input_ids, (0, more))
    return RolloutMicrobatch(
        rows.rollout_indices, tokens, targets, sampled, padded_tokens(targets != IGNORE_INDEX)
    )


def has_loss_tokens(rows: RolloutMicrobatch) -> bool:
    """Tell whether a microbatch has answers, or only keeps its replica in step with others."""
    return bool(rows.loss_tokens.mask.any())


def _nothing(device: torch.device) -> RolloutMicrobatch:
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    targets = torch.full_like(tokens, IGNORE_INDEX)
    own, sampled = torch.zeros(1, dtype=torch.int64, device=device), tokens.float()
    return RolloutMicrobatch(own, tokens, targets, sampled, padded_tokens(targets != IGNORE_INDEX))
