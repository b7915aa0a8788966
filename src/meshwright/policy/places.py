"""`Places`: sequences that are admitted, and which of them makes room for others."""

from collections.abc import Iterator

from meshwright.policy.sequences import Sequence


class Places:
    """Sequences in the order they came in."""

    __slots__ = ("_members", "_ranks")

    def __init__(self) -> None:
        self._members: dict[Sequence, None] = {}
        self._ranks: dict[int, int] = {}
        """How many of them have which priority."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a place."""
        self._members[sequence] = None
        self._ranks[sequence.priority] = self._ranks.get(sequence.priority, 0) + 1

    def leave(self, sequence: Sequence) -> None:
        """Take its place away."""
        del self._members[sequence]
        self._ranks[sequence.priority] -= 1
        if not self._ranks[sequence.priority]:
            del self._ranks[sequence.priority]

    def has_below(self, priority: int) -> bool:
        """Tell whether one of them has a lower priority."""
        return any(rank < priority for rank in self._ranks)

    def last(self) -> Sequence:
        """Return who makes room: of those with the lowest priority, who came in last."""
        if len(self._ranks) == 1:
            return next(reversed(self._members))
        return min(reversed(self._members), key=lambda each: each.priority)
