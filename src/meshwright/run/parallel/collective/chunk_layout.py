"""`ChunkLayout`: where the chunks of a collective lie in tensors of a given size.

The rule by which a message is cut is that of `chunk_edges`; here chunks get lengths and places.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.policy.collective.chunk_edges import count_equal_parts, list_chunk_edges
from meshwright.policy.collective.collective import SEPARATE_OUTPUT_OPS, Collective
from meshwright.policy.collective.contract import build_contract, get_input_output_starts


class TensorSizes(NamedTuple):
    """Elements of the tensors that one rank brings; None where it need not bring one."""

    input_elements: int | None
    output_elements: int | None


class ChunkLayout:
    """The chunks of a message of so many elements."""

    def __init__(self, collective: Collective, elements: int) -> None:
        """For all_to_all_v `elements` is the size of one chunk, elsewhere that of the message."""
        self.collective, self.elements = collective, elements
        self.num_rank_parts = count_equal_parts(collective)
        """Equal parts, one per rank, that the message consists of."""
        self.rank_part_elements = elements // self.num_rank_parts
        self.chunks_per_rank_part = collective.chunks // self.num_rank_parts
        self._uneven = collective.op == "all_to_all_v"
        self._edges = () if self._uneven else list_chunk_edges(collective, elements)

    def get_chunk_elements(self, chunk: int) -> int:
        """Return the elements of a chunk."""
        if self._uneven:
            return self.elements
        index = chunk % self.chunks_per_rank_part
        return self._edges[index + 1] - self._edges[index]

    def get_chunk_offset(self, chunk: int) -> int:
        """Return where a chunk begins in the whole message."""
        if self._uneven:
            return chunk * self.elements
        part, index = divmod(chunk, self.chunks_per_rank_part)
        return part * self.rank_part_elements + self._edges[index]

    def get_tensor_sizes(self, rank: int) -> TensorSizes:
        """Return the elements a rank gives and gets, where input and output are separate."""
        collective, whole, part = self.collective, self.elements, self.rank_part_elements
        at_root = rank == collective.root
        match collective.op:
            case "broadcast":
                return TensorSizes(whole if at_root else None, whole)
            case "reduce":
                return TensorSizes(whole, whole if at_root else None)
            case "reduce_scatter":
                return TensorSizes(whole, part)
            case "all_gather":
                return TensorSizes(part, whole)
            case "gather":
                return TensorSizes(part, whole if at_root else None)
            case "scatter":
                return TensorSizes(whole if at_root else None, part)
            case "all_to_all_v":
                counts = collective.counts
                return TensorSizes(
                    sum(counts[rank]) * whole, sum(row[rank] for row in counts) * whole
                )
            case "send_recv":
                sends, gets = collective.peers[rank] >= 0, rank in collective.peers
                return TensorSizes(whole if sends else None, whole if gets else None)
            case _:
                return TensorSizes(whole, whole)


INPUT, OUTPUT, WORKSPACE = range(3)


class ElementRun(NamedTuple):
    """Elements in a row of one tensor."""

    tensor: int
    start: int
    length: int


class SlotMap:
    """Says in which tensor a slot is read and written.

    Out of place a slot that was not written yet is read from the input; what is written goes to
    the output where it is wanted there, and to the workspace otherwise.
    """

    def __init__(
        self, collective: Collective, rank: int, cuts: ChunkLayout, *, in_place: bool
    ) -> None:
        self._cuts, self._in_place = cuts, in_place
        self._exchange = collective.op in SEPARATE_OUTPUT_OPS
        self._message = 0 if self._exchange else collective.chunks
        promise = build_contract(collective)
        _, output = get_input_output_starts(collective)
        own = rank * cuts.rank_part_elements
        sizes = cuts.get_tensor_sizes(rank)
        given, wanted = (table[table[:, 0] == rank] for table in (promise.inputs, promise.outputs))
        skipped = own if sizes.input_elements == cuts.rank_part_elements != cuts.elements else 0
        self._given = {
            int(slot): (
                cuts.get_chunk_offset(int(slot)) - skipped,
                cuts.get_chunk_elements(int(slot)),
            )
            for slot in given[:, 1]
        }
        skipped = own if sizes.output_elements == cuts.rank_part_elements != cuts.elements else 0
        self._wanted = {
            int(slot): (
                cuts.get_chunk_offset(int(slot) - output) - skipped,
                cuts.get_chunk_elements(int(slot) - output),
            )
            for slot in wanted[:, 1]
        }
        lengths = [cuts.get_chunk_elements(chunk) for chunk in range(max(1, collective.chunks))]
        self._capacity = max(lengths)
        self._spare: dict[int, int] = {}
        self._written: dict[int, int] = {}
        """The step in which each slot was written first."""

    @property
    def workspace_elements(self) -> int:
        """Elements of the slots that lie in no tensor of the user."""
        return len(self._spare) * self._capacity

    def locate_read(self, slot: int, step: int, begin: int, end: int) -> ElementRun:
        """Return where a piece of a slot lies before a step."""
        if self._written.get(slot, step) < step or self._in_place_slot(slot):
            return self._home(slot, begin, end)
        start, _ = self._given[slot]
        return ElementRun(INPUT, start + begin, end - begin)

    def locate_write(self, slot: int, step: int, begin: int, end: int) -> ElementRun:
        """Return where a piece of a slot is put."""
        self._written.setdefault(slot, step)
        return self._home(slot, begin, end)

    def _in_place_slot(self, slot: int) -> bool:
        return self._in_place and slot < self._message

    def _home(self, slot: int, begin: int, end: int) -> ElementRun:
        if self._in_place_slot(slot):
            return ElementRun(INPUT, self._cuts.get_chunk_offset(slot) + begin, end - begin)
        if slot in self._wanted:
            return ElementRun(OUTPUT, self._wanted[slot][0] + begin, end - begin)
        spare = self._spare.setdefault(slot, len(self._spare)) * self._capacity
        return ElementRun(WORKSPACE, spare + begin, end - begin)

    def iter_retained_slots(self) -> Iterator[tuple[int, ElementRun, ElementRun]]:
        """Return slots that a rank gave and keeps, where nothing wrote them to the output."""
        if self._in_place:
            return
        for slot, (start, length) in self._wanted.items():
            if slot not in self._written and length and slot in self._given:
                source = ElementRun(INPUT, self._given[slot][0], length)
                yield slot, source, ElementRun(OUTPUT, start, length)
