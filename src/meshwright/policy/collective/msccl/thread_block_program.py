"""`ThreadBlockProgram`: a collective as MSCCL runs it, thread block by thread block.

A lane is a thread block: it works through its steps in order, sends to at most one peer, takes from
at most one, on one channel. A step may wait for a step of another lane of the same rank. Nothing
here says that a program is right; `verify_program` does, for programs written here or read.

The kinds of steps are MSCCL's (msccl-tools, language/ir.py; semantics as in RCCL's interpreter):

    s      send src                             r      receive into dst
    rcs    receive into dst, send it on         rrc    receive, add src, put into dst
    rrs    receive, add src, send on            rrcs   receive, add src, put into dst, send on
    cpy    copy src to dst                      re     add src to dst
    nop    only wait
"""

from typing import Literal, NamedTuple, get_args

import msgspec

from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.collective import Collective, CollectiveOp

StepKind = Literal["s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"]
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)
SENDING_KINDS: frozenset[str] = frozenset({"s", "rcs", "rrs", "rrcs"})
RECEIVING_KINDS: frozenset[str] = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
SRC_READING_KINDS: frozenset[str] = frozenset({"s", "rrs", "rrc", "rrcs", "cpy", "re"})
DST_WRITING_KINDS: frozenset[str] = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})

MscclProtocol = Literal["Simple", "LL", "LL128"]
PROTOCOLS: tuple[MscclProtocol, ...] = get_args(MscclProtocol)

PIECES_IN_FLIGHT: dict[MscclProtocol, int] = {"Simple": 2, "LL": 8, "LL128": 8}
"""Pieces of a message that fit between a sender and a receiver. NCCL's connection has 8 steps;
MSCCL's Simple protocol takes 4 of them for a piece (MSCCL_CHUNKSTEPS = NCCL_STEPS / 2), the others
one."""
PIECE_BYTES: dict[MscclProtocol, int] = {"Simple": 2 << 20, "LL": 16 << 10, "LL128": 50_176}
"""What fits into one piece: 4 of the 8 steps of a 4 MiB buffer for Simple, one step of the smallest
buffers for the others (RCCL, device.h and init.cc: 256 threads with 8 lines of 8 bytes for LL, and
with 28 words of 8 bytes, 7 of 8 for data, for LL128; NCCL's are larger)."""


class StepDependency(NamedTuple):
    """A step of another lane of the same rank that must be over."""

    thread_block: int
    step: int


class ThreadBlockStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a lane does at one point of its list."""

    kind: StepKind
    src: BufferChunk | None = None
    dst: BufferChunk | None = None
    count: int = 0
    """Chunks in a row."""
    dependency: StepDependency | None = None
    has_dependents: bool = False
    """Whether the lane announces the end of the step; only such steps can be waited for."""


class ThreadBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One thread block."""

    send_peer: int = -1
    """The rank it sends to; -1 for none."""
    recv_peer: int = -1
    """The rank it takes from; -1 for none."""
    channel: int = 0
    steps: tuple[ThreadBlockStep, ...]


class RankThreadBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The lanes of one rank, and the chunks of its buffers that they use."""

    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    thread_blocks: tuple[ThreadBlock, ...]


class ThreadBlockProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A collective operation carried out by lanes."""

    name: str
    op: CollectiveOp
    chunks: int
    """Equal parts of the message, the larger of what one rank gives and what it gets."""
    ranks: tuple[RankThreadBlocks, ...]
    protocol: MscclProtocol = "Simple"
    in_place: bool = True
    """Whether it may run where input and output share memory."""
    out_of_place: bool = True
    """Whether it may run where they do not."""
    root: int = 0
    min_bytes: int = 0
    """The smallest message it is meant for."""
    max_bytes: int = 0
    """The largest message it is meant for; 0 for any."""

    @property
    def chunks_per_piece(self) -> int:
        """Chunks that travel as one piece of the largest message."""
        if not self.max_bytes:
            return 1
        parts = self.chunks // (len(self.ranks) if self.op in ("gather", "scatter") else 1)
        return max(1, PIECE_BYTES[self.protocol] // -(-self.max_bytes // max(1, parts)))

    @property
    def specification(self) -> Collective:
        """What it has to achieve, as a collective without moves."""
        return Collective(
            name=self.name,
            op=self.op,
            ranks=len(self.ranks),
            chunks=self.chunks,
            slots=self.chunks * (2 if self.op == "all_to_all" else 1),
            sweeps=(),
            root=self.root,
        )

    @property
    def steps(self) -> int:
        """Steps of all lanes together."""
        return sum(len(lane.steps) for rank in self.ranks for lane in rank.thread_blocks)


def format_step_name(rank: int, lane: int, index: int) -> str:
    """Return what people call a step."""
    return f"rank {rank}, lane {lane}, step {index}"


def format_chunk_name(spot: BufferChunk | None) -> str:
    """Return what people call a chunk of a buffer."""
    return f"{spot.buffer} {spot.chunk}" if spot is not None else "nothing"


def describe_step(lane: ThreadBlock, step: ThreadBlockStep) -> str:
    """Say what a step does."""
    words = {
        "s": f"sends {format_chunk_name(step.src)} to rank {lane.send_peer}",
        "r": f"takes {format_chunk_name(step.dst)} from rank {lane.recv_peer}",
        "rcs": f"passes {format_chunk_name(step.dst)} from rank {lane.recv_peer} on to rank "
        f"{lane.send_peer}",
        "rrs": f"adds {format_chunk_name(step.src)} and passes on to rank {lane.send_peer}",
        "rrc": f"adds what rank {lane.recv_peer} sends into {format_chunk_name(step.dst)}",
        "rrcs": f"adds into {format_chunk_name(step.dst)} and passes on to rank {lane.send_peer}",
        "cpy": f"copies {format_chunk_name(step.src)} to {format_chunk_name(step.dst)}",
        "re": f"adds {format_chunk_name(step.src)} to {format_chunk_name(step.dst)}",
        "nop": "only waits",
    }
    return words[step.kind]
