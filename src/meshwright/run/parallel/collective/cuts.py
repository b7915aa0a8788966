"""`Cuts`: where the chunks of a collective lie in tensors of a given size.

The rule by which a message is cut is that of `chunking`; here chunks get lengths and places.
"""

from typing import NamedTuple

from meshwright.policy.collective.chunking import equal_parts, part_edges
from meshwright.policy.collective.collective import Collective


class Sizes(NamedTuple):
    """Elements of the tensors that one rank brings; None where it need not bring one."""

    given: int | None
    wanted: int | None


class Cuts:
    """The chunks of a message of so many elements."""

    def __init__(self, collective: Collective, elements: int) -> None:
        """For all_to_all_v `elements` is the size of one chunk, elsewhere that of the message."""
        self.collective, self.elements = collective, elements
        self.parts = equal_parts(collective)
        """Equal parts, one per rank, that the message consists of."""
        self.part_elements = elements // self.parts
        self.part_chunks = collective.chunks // self.parts
        self._uneven = collective.op == "all_to_all_v"
        self._edges = () if self._uneven else part_edges(collective, elements)

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
