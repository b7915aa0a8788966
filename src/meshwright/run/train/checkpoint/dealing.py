"""`deal_out`: which rank writes which box, from what all ranks hold.

What one rank alone holds it writes. What several hold is written once, by the one with least to
write so far, the largest first. Boxes that overlap without being equal are cut. What nobody holds
is found here, before anything is written.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.errors import Problem
from meshwright.policy.boxes import Extent, apart
from meshwright.run.train.checkpoint.image import Box


class Claim(NamedTuple):
    """What one rank holds of a tensor."""

    dtype: str
    whole: tuple[int, ...]
    boxes: tuple[Extent, ...]


Claims = dict[str, Claim]
"""What one rank holds, by the names of tensors."""


class Dealt(NamedTuple):
    """Who writes what, or why that cannot be said."""

    boxes: list[list[Box]]
    """By rank."""
    problems: list[Problem]


class _Shared(NamedTuple):
    box: Box
    holders: list[int]


def deal_out(ranks: Sequence[Claims]) -> Dealt:
    """Deal out every box to a rank that holds it."""
    boxes: list[list[Box]] = [[] for _ in ranks]
    written = [0] * len(ranks)
    problems: list[Problem] = []
    shared: list[_Shared] = []

    def give(box: Box, rank: int) -> None:
        boxes[rank].append(box)
        written[rank] += box.bytes

    for name in dict.fromkeys(name for claims in ranks for name in claims):
        held = {rank: claims[name] for rank, claims in enumerate(ranks) if name in claims}
        found, wrong = _pieces(name, held)
        problems += wrong
        for box, holders in found:
            if len(holders) == 1:
                give(box, holders[0])
            else:
                shared.append(_Shared(box, holders))
    for box, holders in sorted(shared, key=lambda each: -each.box.bytes):
        give(box, min(holders, key=written.__getitem__))
    return Dealt(boxes, problems)


def _pieces(name: str, held: dict[int, Claim]) -> tuple[list[_Shared], list[Problem]]:
    """Cut a tensor into boxes, each with the ranks that hold it; say what keeps it from that."""
    dtype, whole, _ = next(iter(held.values()))
    for rank, claim in held.items():
        if (claim.dtype, claim.whole) != (dtype, whole):
            what = (
                f"one rank holds {dtype} {list(whole)}, "
                f"rank {rank} {claim.dtype} {list(claim.whole)}"
            )
            return [], [Problem(name, what, "give all ranks the same model")]
    everything = Extent((0,) * len(whole), whole)
    if not everything.elements:
        return [_Shared(Box(name, dtype, whole, *everything), list(held))], []
    holders: dict[Extent, list[int]] = {}
    for rank, claim in held.items():
        for extent in dict.fromkeys(claim.boxes):
            holders.setdefault(extent, []).append(rank)
    pieces = apart(holders)
    problems = coverage(name, whole, sum(piece.elements for piece, _ in pieces), "held")
    made = [_Shared(Box(name, dtype, whole, *piece), holders[box]) for piece, box in pieces]
    return made, problems


def coverage(name: str, whole: tuple[int, ...], elements: int, word: str) -> list[Problem]:
    """Say so where fewer elements of a tensor are held, or asked for, than it has."""
    total = Extent((0,) * len(whole), whole).elements
    if elements == total:
        return []
    what = f"{elements:,} of its {total:,} elements are {word} by any rank"
    return [Problem(name, what, "place every part of it on some rank")]
