"""Which layers lie on which pipeline rank.

Chunks are numbered in the order a token meets them. Chunk `c` lies on rank `c mod pp`, except
under the folded schedules, which turn around at the last rank, and under `dualpipe`, where every
rank holds its own chunk and its mirror image's.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.layout.choices import V_SCHEDULES

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import Layout


class ModelChunk(NamedTuple):
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


def list_chunks(layout: "Layout", layers: int) -> tuple[ModelChunk, ...]:
    """Return every chunk with its layers and the rank that holds it."""
    return _chunks(layout.schedule, layout.pp, split_layers(layout, layers))


def list_chunks_by_rank(layout: "Layout", layers: int) -> tuple[tuple[ModelChunk, ...], ...]:
    """Return the chunks of every pipeline rank, rank 0 first."""
    return _rank_chunks(layout.schedule, layout.pp, split_layers(layout, layers))


@lru_cache(maxsize=4096)
def _chunks(schedule: str, pp: int, sizes: tuple[int, ...]) -> tuple[ModelChunk, ...]:
    found, first = [], 0
    for index, size in enumerate(sizes):
        ends = index == 0, index == len(sizes) - 1
        found += [
            ModelChunk(index, rank, first, first + size, *ends)
            for rank in _ranks_of(schedule, pp, index)
        ]
        first += size
    return tuple(found)


@lru_cache(maxsize=4096)
def _rank_chunks(
    schedule: str, pp: int, sizes: tuple[int, ...]
) -> tuple[tuple[ModelChunk, ...], ...]:
    found: list[list[ModelChunk]] = [[] for _ in range(pp)]
    for chunk in _chunks(schedule, pp, sizes):
        found[chunk.rank].append(chunk)
    return tuple(map(tuple, found))


def _ranks_of(schedule: str, pp: int, index: int) -> tuple[int, ...]:
    turn, rank = divmod(index, pp)
    mirror = pp - 1 - rank
    if schedule == "dualpipe" and pp > 1:
        return (rank, mirror)
    if schedule in V_SCHEDULES and turn % 2:
        return (mirror,)
    return (rank,)
