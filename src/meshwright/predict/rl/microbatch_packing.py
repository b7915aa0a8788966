"""`pack_update`: what an update trains on, as microbatches of sequences of equal length.

Whole sequences share microbatches: the longest are placed first, each where it leaves least room
(best fit decreasing). Two of three thousand tokens do not share room for four thousand: there are
as many microbatches as that leaves, not as tokens alone would fill.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from meshwright.predict.rl.rl_setup import RolloutBatch
from meshwright.spec.workload import LoRASpec, TrainingWorkload

_TILE = 64


class PackedUpdate(NamedTuple):
    """Microbatches of an update, over all replicas."""

    trained_tokens: int
    """That are trained on."""
    mean_length: int
    """Of the mean sequence that a token is in, so that attention costs as much."""
    microbatches: int
    """Microbatches that sequences need."""
    max_microbatch_tokens: int
    """Tokens of the fullest one."""
    adapter: LoRASpec | None = None
    """What is trained."""

    def split_over_replicas(self, replicas: int, *, fills: bool = False) -> "ReplicaShare":
        """Return what each of so many replicas gets; `fills` fills microbatches up."""
        count = ceil(self.microbatches / replicas)
        held = (
            self.max_microbatch_tokens if fills else ceil(self.trained_tokens / (count * replicas))
        )
        sequences = max(1, round(held / self.mean_length))
        length = ceil(held / sequences)
        # Whole tiles, which parallel axes divide as well; short ones stay as they are.
        length = length if length < _TILE else -(-length // _TILE) * _TILE
        return ReplicaShare(count, sequences, length, replicas, self.adapter)


class ReplicaShare(NamedTuple):
    """Microbatches of one replica."""

    microbatches: int
    sequences_per_microbatch: int
    """Of one microbatch."""
    length: int
    replicas: int
    adapter: LoRASpec | None = None

    @property
    def workload(self) -> TrainingWorkload:
        """An update of all replicas."""
        batch = self.microbatches * self.sequences_per_microbatch * self.replicas
        return TrainingWorkload(
            tokens=batch * self.length,
            sequence_length=self.length,
            global_batch=batch,
            adapter=self.adapter,
        )

    @property
    def tokens(self) -> int:
        """Of all replicas, with what fills microbatches up."""
        return self.microbatches * self.sequences_per_microbatch * self.length * self.replicas


def pack_update(
    rounds: RolloutBatch, *, room: int | None = None, updates: int | None = None
) -> PackedUpdate:
    """Return what an update of the first step trains on: the groups that come first.

    `room` are tokens of a microbatch, the rounds' own where it is None; so are `updates`.
    """
    updates = rounds.updates_per_step if updates is None else updates
    drawn = [rounds.sample_group(group) for group in range(rounds.prompts_per_step)]
    tokens, squares = sum(one.tokens for one in drawn), sum(one.squared_length for one in drawn)
    longest = max(one.prompt_tokens + max(one.response_tokens) for one in drawn)
    room = room or rounds.microbatch_tokens or longest
    lengths = [one.prompt_tokens + answer for one in drawn for answer in one.response_tokens]
    each = ceil(len(lengths) / updates)
    bins = [pack_bins(lengths[at : at + each], room) for at in range(0, len(lengths), each)]
    return PackedUpdate(
        trained_tokens=-(-tokens // updates),
        mean_length=max(1, round(squares / tokens)),
        microbatches=ceil(sum(len(one) for one in bins) / len(bins)),
        max_microbatch_tokens=max(max(one) for one in bins),
        adapter=rounds.adapter,
    )


def pack_bins(lengths: Iterable[int], room: int) -> list[int]:
    """Return how full each microbatch is; what is longer than the room has one of its own."""
    alone: list[int] = []
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        if length > room:
            alone.append(length)
            continue
        at = bisect_left(left, length)
        insort(left, (left.pop(at) if at < len(left) else room) - length)
    return alone + [room - one for one in left]
