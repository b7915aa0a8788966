"""Which layers lie on which pipeline rank.

Chunks are numbered in the order a token meets them. Chunk `c` lies on rank `c mod pp`, except
under the folded schedules, which turn around at the last rank, and under `dualpipe`, where every
rank holds its own chunk and its mirror image's.
"""

from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.layout.kinds import FOLDED_SCHEDULES

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import Layout


class Chunk(NamedTuple):
    """A run of consecutive layers on one pipeline rank."""

    position: int
    """Where it stands along the model, the first is 0."""
    rank: int
    """The pipeline rank that holds it."""
    first: int
    """Its first layer."""
    last: int
    """One past its last layer."""
    has_embedding: bool
    has_head: bool


def split_layers(layout: "Layout", layers: int) -> tuple[int, ...]:
    """Return how many layers each chunk holds, the earlier ones taking any remainder."""
    if layout.stage_layers is not None:
        return layout.stage_layers
    each, rest = divmod(layers, layout.chunks)
    return tuple(each + (index < rest) for index in range(layout.chunks))


def chunks(layout: "Layout", layers: int) -> tuple[Chunk, ...]:
    """Return every chunk with its layers and the rank that holds it."""
    found, first = [], 0
    sizes = split_layers(layout, layers)
    for index, size in enumerate(sizes):
        ends = index == 0, index == len(sizes) - 1
        found += [
            Chunk(index, rank, first, first + size, *ends) for rank in _ranks_of(layout, index)
        ]
        first += size
    return tuple(found)


def rank_chunks(layout: "Layout", layers: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every pipeline rank, rank 0 first."""
    every = chunks(layout, layers)
    return tuple(tuple(c for c in every if c.rank == rank) for rank in range(layout.pp))


def _ranks_of(layout: "Layout", index: int) -> tuple[int, ...]:
    turn, rank = divmod(index, layout.pp)
    mirror = layout.pp - 1 - rank
    if layout.schedule == "dualpipe" and layout.pp > 1:
        return (rank, mirror)
    if layout.schedule in FOLDED_SCHEDULES and turn % 2:
        return (mirror,)
    return (rank,)
