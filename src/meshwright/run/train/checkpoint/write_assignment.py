"""`assign_writes`: which rank writes which box, from what all ranks hold.

What one rank alone holds it writes. What several hold is written once, by the one with least to
write so far, the largest first. Boxes that overlap without being equal are cut. What nobody holds
is found here, before anything is written.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.errors import Problem
from meshwright.policy.resharding.tensor_box import TensorBox, split_disjoint
from meshwright.run.train.checkpoint.safetensors_layout import WrittenBox


class TensorClaim(NamedTuple):
    """What one rank holds of a tensor."""

    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[TensorBox, ...]


Claims = dict[str, TensorClaim]
"""What one rank holds, by the names of tensors."""


class WriteAssignment(NamedTuple):
    """Who writes what, or why that cannot be said."""

    boxes_by_rank: list[list[WrittenBox]]
    """By rank."""
    problems: list[Problem]


class _Shared(NamedTuple):
    box: WrittenBox
    holders: list[int]


def assign_writes(ranks: Sequence[Claims]) -> WriteAssignment:
    """Deal out every box to a rank that holds it."""
    boxes: list[list[WrittenBox]] = [[] for _ in ranks]
    written = [0] * len(ranks)
    problems: list[Problem] = []
    shared: list[_Shared] = []

    def give(box: WrittenBox, rank: int) -> None:
        boxes[rank].append(box)
        written[rank] += box.size_bytes

    for name in dict.fromkeys(name for claims in ranks for name in claims):
        held = {rank: claims[name] for rank, claims in enumerate(ranks) if name in claims}
        found, wrong = _pieces(name, held)
        problems += wrong
        for box, holders in found:
            if len(holders) == 1:
                give(box, holders[0])
            else:
                shared.append(_Shared(box, holders))
    for box, holders in sorted(shared, key=lambda each: -each.box.size_bytes):
        give(box, min(holders, key=written.__getitem__))
    return WriteAssignment(boxes, problems)


def _pieces(name: str, held: dict[int, TensorClaim]) -> tuple[list[_Shared], list[Problem]]:
    """Cut a tensor into boxes, each with the ranks that hold it; say what keeps it from that."""
    dtype, whole, _ = next(iter(held.values()))
    for rank, claim in held.items():
        if (claim.dtype, claim.global_shape) != (dtype, whole):
            what = (
                f"one rank holds {dtype} {list(whole)}, "
                f"rank {rank} {claim.dtype} {list(claim.global_shape)}"
            )
            return [], [Problem(name, what, "give all ranks the same model")]
    everything = TensorBox((0,) * len(whole), whole)
    if not everything.num_elements:
        return [_Shared(WrittenBox(name, dtype, whole, *everything), list(held))], []
    holders: dict[TensorBox, list[int]] = {}
    for rank, claim in held.items():
        for extent in dict.fromkeys(claim.boxes):
            holders.setdefault(extent, []).append(rank)
    pieces = split_disjoint(holders)
    problems = find_coverage_problems(
        name, whole, sum(piece.num_elements for piece, _ in pieces), "held"
    )
    made = [_Shared(WrittenBox(name, dtype, whole, *piece), holders[box]) for piece, box in pieces]
    return made, problems


def find_coverage_problems(
    name: str, whole: tuple[int, ...], elements: int, word: str
) -> list[Problem]:
    """Say so where fewer elements of a tensor are held, or asked for, than it has."""
    total = TensorBox((0,) * len(whole), whole).num_elements
    if elements == total:
        return []
    what = f"{elements:,} of its {total:,} elements are {word} by any rank"
    return [Problem(name, what, "place every part of it on some rank")]
