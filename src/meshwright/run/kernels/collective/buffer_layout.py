"""`BufferLayout`: where each chunk of a message lies in the buffer that holds all virtual ranks.

The buffer has a row per place (ranks, then switches) and in it equally wide slots. A slot begins at
a multiple of `ALIGN` elements, so that a kernel moves 16 bytes per thread; the chunk in it may be
shorter, and nobody reads what lies behind it. Knows sizes, no device.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.chunk_edges import (
    ALIGNMENT_ELEMENTS,
    count_equal_parts,
    list_chunk_edges,
)
from meshwright.policy.collective.collective import PARTITIONED_OPS, Collective
from meshwright.policy.collective.contract import build_contract

Int64Array = NDArray[np.int64]

ALIGN = ALIGNMENT_ELEMENTS
"""Elements: 32 bytes for the narrowest type, so two full-width accesses of a thread."""


class BufferPiece(NamedTuple):
    """A run of elements that lies in a rank's own tensor and in the buffer."""

    rank: int
    slot: int
    tensor_start: int
    elements: int


class BufferLayout(NamedTuple):
    """Sizes of a message that is cut into chunks."""

    elements: int
    """Elements of the message: the larger of what one rank gives and what it gets."""
    slot_elements: int
    """Elements from the start of one slot to the start of the next."""
    chunk_elements: Int64Array
    """Elements of each chunk of the message; some are empty where chunks outnumber elements."""


def make_buffer_layout(
    collective: Collective, elements: int, *, room: int | None = None
) -> BufferLayout:
    """Cut a message into the chunks of a collective; `room` where slots are wider than needed."""
    problems = []
    if elements < 1:
        problems.append(Problem("elements", f"a message of {elements} elements", "use 1 or more"))
    ranks, chunks = collective.ranks, collective.chunks
    if collective.op in PARTITIONED_OPS and elements % ranks:
        what = f"{collective.op} cannot share {elements} elements among {ranks} ranks evenly"
        fix = f"use a multiple of {ranks}, such as {-(-elements // ranks) * ranks}"
        problems.append(Problem("elements", what, fix))
    if collective.op == "all_to_all_v" and elements % chunks:
        what = f"all_to_all_v counts whole chunks, and {elements} elements are not {chunks} of them"
        fix = f"use a multiple of {chunks}, such as {-(-elements // chunks) * chunks}"
        problems.append(Problem("elements", what, fix))
    if problems:
        raise InputError(problems)
    lengths = _chunk_lengths(collective, elements)
    longest = int(lengths.max())
    needed = -(-longest // ALIGN) * ALIGN
    if room is None:
        room = needed
    elif room < needed or room % ALIGN:
        what = f"slots of {room} elements for chunks of {longest}"
        fix = f"use {needed} or a larger multiple of {ALIGN}"
        raise InputError([Problem("buffer", what, fix)])
    return BufferLayout(elements, room, lengths)


def list_input_pieces(collective: Collective, sizes: BufferLayout) -> list[BufferPiece]:
    """Return what each rank brings, in the order of its own tensor."""
    given = build_contract(collective).inputs
    return _pieces(given[:, 0], given[:, 1], _lengths(collective, sizes, given[:, 3]))


def list_output_pieces(collective: Collective, sizes: BufferLayout) -> list[BufferPiece]:
    """Return what each rank gets, in the order of its own tensor."""
    wanted = build_contract(collective).outputs
    return _pieces(wanted[:, 0], wanted[:, 1], _lengths(collective, sizes, wanted[:, 3]))


def map_input_elements(collective: Collective, sizes: BufferLayout) -> Int64Array:
    """Return how many elements lie in each cell (place · slots + slot) at the start; -1 in none."""
    given = build_contract(collective).inputs
    held = np.full(collective.num_endpoints * collective.slots, -1, dtype=np.int64)
    cells = given[:, 0].astype(np.int64) * collective.slots + given[:, 1]
    held[cells] = _lengths(collective, sizes, given[:, 3])
    return held


def _chunk_lengths(collective: Collective, elements: int) -> Int64Array:
    if collective.op == "all_to_all_v":
        return np.full(collective.chunks, elements // collective.chunks, dtype=np.int64)
    edges = np.array(list_chunk_edges(collective, elements), dtype=np.int64)
    return np.tile(np.diff(edges), count_equal_parts(collective))


def _lengths(collective: Collective, sizes: BufferLayout, parts: NDArray[np.int32]) -> Int64Array:
    if collective.op == "all_to_all_v":
        # A rank may give more chunks than the message has, and all of them are whole.
        return np.full(len(parts), sizes.chunk_elements[0], dtype=np.int64)
    return sizes.chunk_elements[parts]


def _pieces(
    ranks: NDArray[np.int32], slots: NDArray[np.int32], lengths: Int64Array
) -> list[BufferPiece]:
    pieces, start_of = [], dict.fromkeys(ranks.tolist(), 0)
    for index in np.lexsort((slots, ranks)).tolist():
        rank, elements = int(ranks[index]), int(lengths[index])
        if elements:
            pieces.append(BufferPiece(rank, int(slots[index]), start_of[rank], elements))
            start_of[rank] += elements
    return pieces
