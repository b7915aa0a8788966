"""`Places`: sequences that are admitted, and which of them makes room for others."""

from meshwright.policy.sequences import Sequence


class Places(dict[Sequence, None]):
    """Sequences in the order they came in: a dictionary, so that looking costs no call."""

    __slots__ = ("_ranks",)

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[int, int] = {}
        """How many of them have which priority, but for those that have none."""

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a place."""
        self[sequence] = None
        if rank := sequence.priority:
            self._ranks[rank] = self._ranks.get(rank, 0) + 1

    def leave(self, sequence: Sequence) -> None:
        """Take its place away."""
        del self[sequence]
        if rank := sequence.priority:
            self._ranks[rank] -= 1
            if not self._ranks[rank]:
                del self._ranks[rank]

    def has_below(self, priority: int) -> bool:
        """Tell whether one of them has a lower priority."""
        if priority > 0 and sum(self._ranks.values()) < len(self):
            return True
        return any(rank < priority for rank in self._ranks)

    def last(self) -> Sequence:
        """Return who makes room: of those with the lowest priority, who came in last."""
        if not self._ranks or len(self) in self._ranks.values():
            return next(reversed(self))
        return min(reversed(self), key=lambda each: each.priority)
