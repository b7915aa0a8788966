"""`Cuts`: where the chunks of a collective lie in tensors of a given size.

Parts of a message differ by few elements where the chunks do not divide it. What belongs to one
rank is always the same number of elements, as in `torch.distributed`.
"""

from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import SPLIT, Collective

_WHOLE_LINE = 64
"""Elements that cuts keep together in long messages: one or more cache lines of any type."""


class Sizes(NamedTuple):
    """Elements of the tensors that one rank brings; None where it need not bring one."""

    given: int | None
    wanted: int | None


class Cuts:
    """The chunks of a message of so many elements."""

    def __init__(self, collective: Collective, elements: int) -> None:
        """For all_to_all_v `elements` is the size of one chunk, elsewhere that of the message."""
        self.collective, self.elements = collective, elements
        op, ranks, chunks = collective.op, collective.ranks, collective.chunks
        self.parts = ranks if op in SPLIT else 1
        """Equal parts, one per rank, that the message consists of."""
        self.part_elements = elements // self.parts
        self.part_chunks = chunks // self.parts
        self._uneven = op == "all_to_all_v"
        self._edges = () if self._uneven else cut(self.part_elements, self.part_chunks)

    def length(self, chunk: int) -> int:
        """Return the elements of a chunk."""
        if self._uneven:
            return self.elements
        index = chunk % self.part_chunks
        return self._edges[index + 1] - self._edges[index]

    def start(self, chunk: int) -> int:
        """Return where a chunk begins in the whole message."""
        if self._uneven:
            return chunk * self.elements
        part, index = divmod(chunk, self.part_chunks)
        return part * self.part_elements + self._edges[index]

    def sizes(self, rank: int) -> Sizes:
        """Return the elements a rank gives and gets, where input and output are separate."""
        collective, whole, part = self.collective, self.elements, self.part_elements
        at_root = rank == collective.root
        match collective.op:
            case "broadcast":
                return Sizes(whole if at_root else None, whole)
            case "reduce":
                return Sizes(whole, whole if at_root else None)
            case "reduce_scatter":
                return Sizes(whole, part)
            case "all_gather":
                return Sizes(part, whole)
            case "gather":
                return Sizes(part, whole if at_root else None)
            case "scatter":
                return Sizes(whole if at_root else None, part)
            case "all_to_all_v":
                counts = collective.counts
                return Sizes(sum(counts[rank]) * whole, sum(row[rank] for row in counts) * whole)
            case "send_recv":
                sends, gets = collective.peers[rank] >= 0, rank in collective.peers
                return Sizes(whole if sends else None, whole if gets else None)
            case _:
                return Sizes(whole, whole)


def cut(elements: int, parts: int) -> tuple[int, ...]:
    """Return the edges of nearly equal parts, on whole lines where the parts are long."""
    unit = _WHOLE_LINE if elements >= 16 * _WHOLE_LINE * parts else 1
    inner = [part * elements // (parts * unit) * unit for part in range(parts)]
    return (*inner, elements)


def message_elements(
    collective: Collective, rank: int, given: int | None, wanted: int | None, chunk: int | None
) -> int:
    """Return the elements of the message (of a chunk, for all_to_all_v) from a rank's tensors.

    Either may be None; `in_place_elements` is for tensors that hold the whole message.
    """
    op, ranks = collective.op, collective.ranks
    if op == "all_to_all_v":
        return _chunk_elements(collective, rank, given, wanted, chunk)
    if op in ("all_gather", "gather") and given is not None:
        return given * ranks
    if op == "scatter" and wanted is not None:
        return wanted * ranks
    if given is not None and not (op == "scatter" and rank != collective.root):
        return in_place_elements(collective, rank, given)
    if wanted is not None:
        return wanted * (ranks if op == "reduce_scatter" else 1)
    raise InputError([Problem("out", f"rank {rank} gave no tensor for its result", "give one")])


def in_place_elements(collective: Collective, rank: int, given: int) -> int:
    """Return the elements of a message that one tensor holds."""
    ranks = collective.ranks
    if collective.op in SPLIT and given % ranks:
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
