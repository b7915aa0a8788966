"""`packed`: what an update trains on, as microbatches of sequences of equal length.

Whole sequences share microbatches: the longest are placed first, each where it leaves least room
(best fit decreasing). Two of three thousand tokens do not share room for four thousand: there are
as many microbatches as that leaves, not as tokens alone would fill.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from meshwright.predict.rl.setup import Rounds
from meshwright.spec.workload import Adapter, Training

_TILE = 64


class Packed(NamedTuple):
    """Microbatches of an update, over all replicas."""

    tokens: int
    """That are trained on."""
    length: int
    """Of the mean sequence that a token is in, so that attention costs as much."""
    bins: int
    """Microbatches that sequences need."""
    fullest: int
    """Tokens of the fullest one."""
    adapter: Adapter | None = None
    """What is trained."""

    def share(self, replicas: int, *, fills: bool = False) -> "Share":
        """Return what each of so many replicas gets; `fills` fills microbatches up."""
        count = ceil(self.bins / replicas)
        held = self.fullest if fills else ceil(self.tokens / (count * replicas))
        sequences = max(1, round(held / self.length))
        length = ceil(held / sequences)
        # Whole tiles, which parallel axes divide as well; short ones stay as they are.
        length = length if length < _TILE else -(-length // _TILE) * _TILE
        return Share(count, sequences, length, replicas, self.adapter)


class Share(NamedTuple):
    """Microbatches of one replica."""

    microbatches: int
    sequences: int
    """Of one microbatch."""
    length: int
    replicas: int
    adapter: Adapter | None = None

    @property
    def workload(self) -> Training:
        """An update of all replicas."""
        batch = self.microbatches * self.sequences * self.replicas
        return Training(
            tokens=batch * self.length,
            sequence_length=self.length,
            global_batch=batch,
            adapter=self.adapter,
        )

    @property
    def tokens(self) -> int:
        """Of all replicas, with what fills microbatches up."""
        return self.microbatches * self.sequences * self.length * self.replicas


def packed(rounds: Rounds, *, room: int | None = None, updates: int | None = None) -> Packed:
    """Return what an update of the first step trains on: the groups that come first.

    `room` are tokens of a microbatch, the rounds' own where it is None; so are `updates`.
    """
    updates = rounds.updates if updates is None else updates
    drawn = [rounds.drawn(group) for group in range(rounds.prompts)]
    tokens, squares = sum(one.tokens for one in drawn), sum(one.squares for one in drawn)
    longest = max(one.prompt + max(one.answers) for one in drawn)
    room = room or rounds.packed or longest
    lengths = [one.prompt + answer for one in drawn for answer in one.answers]
    each = ceil(len(lengths) / updates)
    bins = [bins_of(lengths[at : at + each], room) for at in range(0, len(lengths), each)]
    return Packed(
        tokens=-(-tokens // updates),
        length=max(1, round(squares / tokens)),
        bins=ceil(sum(len(one) for one in bins) / len(bins)),
        fullest=max(max(one) for one in bins),
        adapter=rounds.adapter,
    )


def bins_of(lengths: Iterable[int], room: int) -> list[int]:
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
