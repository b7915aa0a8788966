"""`superseded`: which checkpoints a policy lets go. It touches no disk."""

from collections.abc import Sequence
from typing import NamedTuple


class Kept(NamedTuple):
    """What the policy has to know of a checkpoint."""

    serial: int
    step: int
    sound: bool
    """Whether it can be loaded, as far as a quick look tells."""


def superseded(
    present: Sequence[Kept], *, keep_last: int, keep_every: int | None
) -> tuple[int, ...]:
    """Return the serials to delete.

    The newest `keep_last` sound ones stay, and so does the newest sound one of every step that
    divides by `keep_every`. Damaged ones count for nothing; they go once enough newer sound ones
    are there, so that whatever can be saved of them is there until then. Without any sound
    checkpoint nothing goes.
    """
    newest_first = sorted(present, key=lambda one: -one.serial)
    sound = [one for one in newest_first if one.sound]
    if not sound:
        return ()
    last = sound[:keep_last]
    stay = {one.serial for one in last}
    if keep_every is not None:
        for_good: dict[int, int] = {}
        for one in sound:
            if one.step % keep_every == 0:
                for_good.setdefault(one.step, one.serial)
        stay |= set(for_good.values())
    if len(last) < keep_last:
        stay |= {one.serial for one in present if not one.sound}
    oldest = last[-1].serial
    return tuple(
        one.serial for one in newest_first if one.serial not in stay and one.serial < oldest
    )
