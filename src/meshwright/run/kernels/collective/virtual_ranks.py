"""`VirtualRanks`: a collective run over the buffers of all its ranks, which lie on one device.

It moves and adds exactly what the ranks of a cluster would, so that an algorithm and the kernels
are tested on one GPU, or on none with Triton's interpreter (TRITON_INTERPRET=1).
"""

from collections.abc import Callable, Sequence

import torch

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.policy.collective.chunk_edges import count_message_elements
from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.verification.verifier import verify_collective
from meshwright.run.kernels.collective.buffer_layout import (
    BufferLayout,
    BufferPiece,
    list_input_pieces,
    list_output_pieces,
    make_buffer_layout,
)
from meshwright.run.kernels.collective.collective_launcher import TILE_BYTES, CollectiveLauncher
from meshwright.run.kernels.collective.collective_reference import SUM_TYPES, run_program_reference
from meshwright.run.kernels.collective.kernel_program import KernelProgram, lower_to_kernel


class VirtualRanks:
    """A sound collective, a buffer with a row for each of its places, and the work between them."""

    def __init__(
        self,
        collective: Collective,
        buffer: torch.Tensor,
        *,
        elements: int | None = None,
        tile: int | None = None,
    ) -> None:
        """Take a buffer [places, slots · room]; chunk c of a rank's message begins at c · room.

        The message has `elements` elements, or as many as the slots have room for. `tile` is how
        many of them one program of the kernel moves at a time.
        """
        problems = [*_buffer_problems(collective, buffer), *verify_collective(collective).problems]
        if problems:
            raise InputError(problems)
        room = buffer.shape[1] // collective.slots
        if elements is None:
            elements = room * collective.chunks
        self.collective = collective
        self.buffer = buffer
        self.buffer_layout: BufferLayout = make_buffer_layout(collective, elements, room=room)
        if tile is None:
            tile = TILE_BYTES // buffer.element_size()
        self.program: KernelProgram = lower_to_kernel(collective, self.buffer_layout, tile=tile)
        self._launcher: CollectiveLauncher | None = None

    @classmethod
    def from_inputs(
        cls, collective: Collective, inputs: Sequence[torch.Tensor], *, tile: int | None = None
    ) -> "VirtualRanks":
        """Make a buffer and put in what each rank brings: one flat tensor per rank.

        A rank that brings nothing, such as all but the root of a broadcast, gives an empty tensor.
        """
        problems = verify_collective(collective).problems or _input_problems(collective, inputs)
        if problems:
            raise InputError(problems)
        elements = _elements(collective, [len(each) for each in inputs])
        sizes = make_buffer_layout(collective, elements)
        shape = collective.num_endpoints, collective.slots * sizes.slot_elements
        buffer = torch.zeros(shape, dtype=inputs[0].dtype, device=inputs[0].device)
        ranks = cls(collective, buffer, elements=elements, tile=tile)
        ranks.load(inputs)
        return ranks

    def load(self, inputs: Sequence[torch.Tensor]) -> None:
        """Put what each rank brings into its slots."""
        pieces = list_input_pieces(self.collective, self.buffer_layout)
        problems = _input_problems(self.collective, inputs) or _size_problems(pieces, inputs)
        if problems:
            raise InputError(problems)
        for piece in pieces:
            end = piece.tensor_start + piece.elements
            self._cell(piece).copy_(inputs[piece.rank][piece.tensor_start : end])

    def outputs(self) -> list[torch.Tensor]:
        """Return what each rank has got, as flat tensors; empty where it is to get nothing."""
        parts: list[list[torch.Tensor]] = [[] for _ in range(self.collective.ranks)]
        for piece in list_output_pieces(self.collective, self.buffer_layout):
            parts[piece.rank].append(self._cell(piece))
        return [torch.cat(each) if each else self.buffer.new_empty(0) for each in parts]

    def run_per_step(self) -> None:
        """Run with one launch per step."""
        self._launches().launch_per_step()

    def run_persistent(self) -> None:
        """Run with one launch, whose programs wait for each other between steps.

        It pays where steps are many and small: meeting costs less than a launch.
        """
        self._launches().launch_persistent()

    def run_reference(self) -> None:
        """Run with torch operations instead of the kernel: the same sums, for comparison."""
        run_program_reference(self.program, self.buffer)

    def capture_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of one of the runs above; what is returned repeats them.

        Recording runs nothing but one warm-up, after which the buffer is put back.
        """
        if self.buffer.device.type != "cuda":
            raise MissingDependency(
                "launches are recorded on a CUDA device only", "call the run itself"
            )
        kept = self.buffer.clone()
        run()  # compiles, and puts the tables on the device
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        self.buffer.copy_(kept)
        replay: Callable[[], None] = graph.replay
        return replay

    @property
    def bytes_moved(self) -> int:
        """Bytes that one run reads and writes: a copy counts 2 per byte, an add 3."""
        return self.program.elements_moved * self.buffer.element_size()

    def _launches(self) -> CollectiveLauncher:
        if self._launcher is None:
            self._launcher = CollectiveLauncher(self.program, self.buffer)
        return self._launcher

    def _cell(self, piece: BufferPiece) -> torch.Tensor:
        start = piece.slot * self.buffer_layout.slot_elements
        return self.buffer[piece.rank, start : start + piece.elements]


def _elements(collective: Collective, given: Sequence[int]) -> int:
    """Return the elements of the message, from those that each rank brings."""
    if collective.op == "all_to_all_v":
        rows = [sum(row) for row in collective.counts]
        fullest = rows.index(max(rows))
        chunk = count_message_elements(collective, fullest, given=given[fullest], chunk=0)
        return chunk * collective.chunks
    giver = collective.root if collective.op in ("broadcast", "scatter") else 0
    return count_message_elements(collective, giver, given=given[giver])


def _buffer_problems(collective: Collective, buffer: torch.Tensor) -> list[Problem]:
    problems = []
    if buffer.dtype not in SUM_TYPES:
        known = ", ".join(str(kind).removeprefix("torch.") for kind in SUM_TYPES)
        problems.append(Problem("buffer", f"elements are {buffer.dtype}", f"use one of {known}"))
    places, slots = collective.num_endpoints, collective.slots
    wrong = buffer.ndim != 2 or buffer.shape[0] != places or buffer.shape[1] % max(1, slots)
    if wrong:
        what = f"a buffer of shape {list(buffer.shape)} for {places} ranks of {slots} slots"
        problems.append(Problem("buffer", what, f"use [{places}, {slots} · room of a chunk]"))
    elif not buffer.is_contiguous() or buffer.data_ptr() % 16:
        what = "its rows do not follow each other from a multiple of 16 bytes on"
        problems.append(Problem("buffer", what, "use a tensor of its own, or buffer.clone()"))
    return problems


def _input_problems(collective: Collective, inputs: Sequence[torch.Tensor]) -> list[Problem]:
    if len(inputs) != collective.ranks:
        what = f"{len(inputs)} tensors for {collective.ranks} ranks"
        return [Problem("inputs", what, "give one per rank; empty where a rank brings nothing")]
    first = inputs[0]
    for rank, each in enumerate(inputs):
        if each.dtype != first.dtype or each.device != first.device:
            what = f"{each.dtype} on {each.device}, but rank 0 has {first.dtype} on {first.device}"
            return [Problem(f"inputs[{rank}]", what, "use one type and one device")]
        if each.ndim != 1:
            what = f"a tensor of {each.ndim} dimensions"
            return [Problem(f"inputs[{rank}]", what, "flatten it")]
    return []


def _size_problems(pieces: Sequence[BufferPiece], inputs: Sequence[torch.Tensor]) -> list[Problem]:
    needed = dict.fromkeys(range(len(inputs)), 0)
    for piece in pieces:
        needed[piece.rank] += piece.elements
    return [
        Problem(f"inputs[{rank}]", f"{len(each)} elements", f"give {needed[rank]}")
        for rank, each in enumerate(inputs)
        if len(each) != needed[rank]
    ]
