"""Where a message of so many elements is cut into the chunks of a collective.

Every executor cuts here, so that all of them add the same elements in the same order. What belongs
to one rank is always the same number of elements, as in `torch.distributed`; within it chunks are
nearly equal. Knows numbers of elements, no tensor and no device.
"""

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import PARTITIONED_OPS, Collective

ALIGNMENT_ELEMENTS = 16
"""Elements that cuts keep together in long messages: what two full-width accesses of a GPU's thread
hold in the narrowest type it adds (32 bytes), a cache line of float32."""


def count_equal_parts(collective: Collective) -> int:
    """Return how many equal parts a message has: one per rank where it belongs to the ranks."""
    return collective.ranks if collective.op in PARTITIONED_OPS else 1


def list_chunk_edges(collective: Collective, elements: int) -> tuple[int, ...]:
    """Return where chunks begin in each equal part of a message, and where the last one ends."""
    parts = count_equal_parts(collective)
    return split_evenly(elements // parts, collective.chunks // parts)


def split_evenly(elements: int, pieces: int) -> tuple[int, ...]:
    """Return the edges of nearly equal pieces, on whole lines where the pieces are long.

    Edges are rounded up. ⌈a + b⌉ ≤ ⌈a⌉ + ⌈b⌉, so no piece is longer than an equal share rounded up
    to whole lines: slots of that size hold every piece. Equal shares of whole lines stay equal.
    """
    # A piece that loses a line to another is still within a sixteenth of its share.
    unit = ALIGNMENT_ELEMENTS if elements >= 16 * ALIGNMENT_ELEMENTS * pieces else 1
    inner = [-(-piece * elements // (pieces * unit)) * unit for piece in range(pieces)]
    return (*inner, elements)


def count_message_elements(
    collective: Collective,
    rank: int,
    *,
    given: int | None = None,
    wanted: int | None = None,
    chunk: int | None = None,
) -> int:
    """Return the elements of the message (of a chunk, for all_to_all_v) from a rank's tensors.

    One of the tensors is enough; `count_in_place_elements` is for those that hold the whole
    message. `chunk` is the answer for a rank that has no part in an all_to_all_v.
    """
    op, ranks = collective.op, collective.ranks
    if op == "all_to_all_v":
        return _chunk_elements(collective, rank, given, wanted, chunk)
    if op in ("all_gather", "gather") and given is not None:
        return given * ranks
    if op == "scatter" and wanted is not None:
        return wanted * ranks
    if given is not None and not (op == "scatter" and rank != collective.root):
        return count_in_place_elements(collective, rank, given)
    if wanted is not None:
        return wanted * (ranks if op == "reduce_scatter" else 1)
    raise InputError([Problem("out", f"rank {rank} gave no tensor for its result", "give one")])


def count_in_place_elements(collective: Collective, rank: int, given: int) -> int:
    """Return the elements of a message that one tensor holds."""
    ranks = collective.ranks
    if collective.op in PARTITIONED_OPS and given % ranks:
        what = f"{given:,} elements on rank {rank} are not {ranks} equal parts"
        fix = f"use a multiple of {ranks}, such as {-(-given // ranks) * ranks:,}"
        raise InputError([Problem("tensor", what, fix)])
    return given


def _chunk_elements(
    collective: Collective, rank: int, given: int | None, wanted: int | None, chunk: int | None
) -> int:
    counts = collective.counts
    for elements, chunks, name in (
        (given, sum(counts[rank]), "tensor"),
        (wanted, sum(row[rank] for row in counts), "out"),
    ):
        if elements is None or not chunks:
            continue
        if elements % chunks:
            what = f"{elements:,} elements on rank {rank} are not {chunks} equal chunks"
            raise InputError([Problem(name, what, f"use a multiple of {chunks}")])
        chunk = elements // chunks
        break
    if chunk is None:
        what = f"rank {rank} neither sends nor gets a chunk, so their size is not known"
        raise InputError([Problem("chunk_elements", what, "give chunk_elements")])
    return chunk
