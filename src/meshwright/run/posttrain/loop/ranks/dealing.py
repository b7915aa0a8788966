"""The answers of an update, dealt to the replicas of a layout: each has as many microbatches.

Ranks that gather parameters, trade rows with experts or pass microbatches on meet in every pass, so
a replica that has fewer answers runs rows in which nothing counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.posttrain.loop.answers import Rows, microbatches
from meshwright.run.posttrain.objectives.tokens import padded
from meshwright.run.posttrain.rollouts.record import Rollout
from meshwright.spec.layout import Layout


class Dealt(NamedTuple):
    """All microbatches of an update, replica by replica."""

    rows: list[Rows]
    owners: list[int]
    """The replica of each."""


def deal(
    answers: Sequence[Rollout],
    chosen: Sequence[int],
    layout: Layout,
    *,
    most_tokens: int,
    device: torch.device,
) -> Dealt:
    """Deal the chosen answers out, so that replicas have about as many tokens."""
    lengths = {at: len(answers[at].tokens) for at in chosen}
    longest_first = sorted(chosen, key=lambda each: (-lengths[each], each))
    hands: list[list[int]] = [[] for _ in range(layout.dp)]
    for place, at in enumerate(longest_first):
        # There and back again, or the first would get the longest of every round.
        turn, number = divmod(place, layout.dp)
        hands[number if turn % 2 == 0 else -1 - number].append(at)
    cut = [list(microbatches(answers, hand, most_tokens, device)) for hand in hands]
    count = max(map(len, cut))
    step = parts_of_sequence(layout)
    rows, owners = list[Rows](), list[int]()
    for replica, own in enumerate(cut):
        own += [_nothing(device) for _ in range(count - len(own))]
        rows += [longer(each, step) for each in own]
        owners += [replica] * count
    return Dealt(rows, owners)


def parts_of_sequence(layout: Layout) -> int:
    """Return into how many equal parts ranks cut a sequence: lengths are multiples of it."""
    return (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sequence_parallel else 1)


def longer(rows: Rows, step: int) -> Rows:
    """Return rows whose length is a multiple of a number; nothing counts in what is added."""
    more = -rows.tokens.shape[1] % step
    if not more:
        return rows
    targets = pad(rows.targets, (0, more), value=IGNORED)
    sampled = pad(rows.sampled, (0, more))
    tokens = pad(rows.tokens, (0, more))
    return Rows(rows.own, tokens, targets, sampled, padded(targets != IGNORED))


def counts(rows: Rows) -> bool:
    """Tell whether a microbatch has answers, or only keeps its replica in step with others."""
    return bool(rows.counted.mask.any())


def _nothing(device: torch.device) -> Rows:
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    targets = torch.full_like(tokens, IGNORED)
    own, sampled = torch.zeros(1, dtype=torch.int64, device=device), tokens.float()
    return Rows(own, tokens, targets, sampled, padded(targets != IGNORED))
