"""Which captures go when there are too many, or too many bytes of them."""

from collections.abc import Iterable
from typing import NamedTuple


class Held(NamedTuple):
    """A capture on disk."""

    number: int
    """In the order of time."""
    num_bytes: int
    pinned: bool
    """Something refers to it: it goes last."""


def to_drop(held: Iterable[Held], most: int, most_bytes: int) -> tuple[int, ...]:
    """Return the numbers that go: the oldest first, pinned ones last, the newest of all never."""
    left = sorted(held)
    if not left:
        return ()
    *older, _ = left
    count, size = len(left), sum(one.num_bytes for one in left)
    gone = []
    for one in [one for one in older if not one.pinned] + [one for one in older if one.pinned]:
        if count <= most and size <= most_bytes:
            break
        gone.append(one.number)
        count, size = count - 1, size - one.num_bytes
    return tuple(gone)
