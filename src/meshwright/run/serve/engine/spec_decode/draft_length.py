"""`AdaptiveDraftLength`: how many proposals are worth making, by how the last ones turned out."""

from collections.abc import Sequence

_REST = 16
"""Tokens to wait for after proposals were wrong a few times in a row."""


class AdaptiveDraftLength:
    """Grows while proposals are right, shrinks while they are wrong, and rests where all are.

    Checking proposals is not free where many requests run, and neither is making them by a model.
    """

    def __init__(self, first: int, most: int) -> None:
        self.length = first
        """Proposals worth making now; 0 while resting."""
        self._most, self._resting = most, 0

    def update(self, proposed: Sequence[int], came: Sequence[int]) -> int:
        """Learn from what came in place of the last proposals; return how many were right."""
        if not self.length:
            self._resting -= len(came)
            self.length = int(self._resting <= 0)
        if not proposed or not came:
            return 0
        right = 0
        for guess, token in zip(proposed, came, strict=False):
            if guess != token:
                break
            right += 1
        if right == len(proposed):
            self.length = min(2 * self.length, self._most)
        else:
            self.length = right + 1 if right else self.length // 2
        if not self.length:
            self._resting = _REST
        return right
