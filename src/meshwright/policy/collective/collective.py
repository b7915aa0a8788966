"""`Collective`: an algorithm as moves of chunks between ranks. It knows no sizes, links or clock.

Every rank has a row of numbered slots, each large enough for one chunk. A *move* copies slots from
one place to another, or adds them to what lies there. Moves happen in *steps*: those of one step do
not depend on each other, and a later step sees what earlier ones wrote. Only that data dependence
orders moves; nobody waits for a step to end.

A *sweep* is one step written down once and repeated with shifted slots or peers, so that a ring of
4,096 ranks is two sweeps and not 33 million moves. Rows of a sweep may join late (their phase),
which is how chunks stream through a tree.

A *switch* is a place beside the ranks that can hold slots: moves into it that add are reductions in
the network, moves out of it are multicast.
"""

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

CollectiveOp = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "scatter",
    "send_recv",
]
COLLECTIVE_OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
REDUCING_OPS: frozenset[str] = frozenset({"all_reduce", "reduce_scatter", "reduce"})
ROOTED_OPS: frozenset[str] = frozenset({"broadcast", "reduce", "gather", "scatter"})
SEPARATE_OUTPUT_OPS: frozenset[str] = frozenset({"all_to_all", "all_to_all_v", "send_recv"})
"""Collectives whose output has slots of its own, behind those of the input."""
PARTITIONED_OPS: frozenset[str] = frozenset(
    {"reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"}
)
"""Collectives whose message consists of one equal part per rank."""

Ints = NDArray[np.int32]
SRC, DST, SRC_SLOT, DST_SLOT, COUNT, ADDS, CHANNEL, PHASE = range(8)
MOVE_COLUMNS = ("src", "dst", "src_slot", "dst_slot", "count", "adds", "channel", "phase")


class ChunkMoves:
    """Moves of one step, column by column."""

    __slots__ = ("table",)

    def __init__(self, table: Ints) -> None:
        self.table = table
        """One row per move, columns as in `MOVE_COLUMNS`."""

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkMoves) and np.array_equal(self.table, other.table)

    __hash__ = None  # type: ignore[assignment]

    @property
    def src(self) -> Ints:
        """Where the chunks come from: a rank, or a switch numbered after the ranks."""
        return self.table[:, SRC]

    @property
    def dst(self) -> Ints:
        """Where they go."""
        return self.table[:, DST]

    @property
    def src_slot(self) -> Ints:
        """The first slot that is read."""
        return self.table[:, SRC_SLOT]

    @property
    def dst_slot(self) -> Ints:
        """The first slot that is written."""
        return self.table[:, DST_SLOT]

    @property
    def count(self) -> Ints:
        """How many slots in a row."""
        return self.table[:, COUNT]

    @property
    def adds(self) -> Ints:
        """1 where what arrives is added to what lies there, 0 where it replaces it."""
        return self.table[:, ADDS]

    @property
    def channel(self) -> Ints:
        """Which of the parallel lanes between two places carries it."""
        return self.table[:, CHANNEL]

    @property
    def phase(self) -> Ints:
        """The repetition of the sweep from which on the row takes part."""
        return self.table[:, PHASE]

    def split_by_slot(self) -> "ChunkMoves":
        """Return the same moves, slot by slot."""
        counts = self.count
        if (counts == 1).all():
            return self
        table = np.repeat(self.table, counts, axis=0)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        offsets = np.arange(len(table), dtype=np.int32) - firsts.astype(np.int32)
        table[:, SRC_SLOT] += offsets
        table[:, DST_SLOT] += offsets
        table[:, COUNT] = 1
        return ChunkMoves(table)


class SweepShift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the moves of a sweep change from one repetition to the next."""

    src_slot: int = 0
    """Added to the slot that is read."""
    dst_slot: int = 0
    """Added to the slot that is written."""
    dst: int = 0
    """Added to the place that is written."""
    slot_wrap: int = 0
    """Slots go around in blocks of this many; 0 lets them run on."""
    dst_wrap: int = 0
    """Places go around in blocks of this many."""
    slot_order: tuple[int, ...] = ()
    """Where given, rows number slots along this order: v stands for slot `slot_order[v]`, and both
    counts and shifts run along it. So a ring through the ranks in any order is still one sweep,
    and slots at equal distances are one row. Slots beyond it stand for themselves."""

    def resolve_slot_order(self, moves: ChunkMoves) -> ChunkMoves:
        """Return moves by the slots they stand for, one slot each where there is an order."""
        if not self.slot_order:
            return moves
        order = np.array(self.slot_order, dtype=np.int32)
        table = moves.split_by_slot().table.copy(order="F")
        for column in (SRC_SLOT, DST_SLOT):
            table[:, column] = _named(table[:, column], order)
        return ChunkMoves(table)


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, repeated."""

    moves: ChunkMoves
    """The moves as they are the first time each takes part."""
    span: int = 1
    """How often each move is made."""
    shift: SweepShift = SweepShift()
    """What changes from one time to the next."""

    def __post_init__(self) -> None:
        # A sweep is shared: by proofs, plans and caches that would not notice a change.
        self.moves.table.flags.writeable = False

    @property
    def steps(self) -> int:
        """Steps of the sweep: the repetitions, and the wait of the row that joins last."""
        return self.span + (int(self.moves.phase.max()) if len(self.moves) else 0)

    def get_moves(self, step: int) -> ChunkMoves:
        """Return the moves of one of its steps."""
        return _Unrolled(self).at(step)

    def iterate_steps(self) -> Iterator[ChunkMoves]:
        """Go through the moves of its steps in order."""
        unrolled = _Unrolled(self)
        for step in range(self.steps):
            yield unrolled.at(step)


class _Unrolled:
    """A sweep made ready to be taken apart: columns lie in one piece each."""

    def __init__(self, sweep: Sweep) -> None:
        self.span, self.shift = sweep.span, sweep.shift
        self.order = np.array(sweep.shift.slot_order, dtype=np.int32)
        moves = sweep.moves.split_by_slot() if len(self.order) else sweep.moves
        self.table = np.asfortranarray(moves.table)
        self.late = len(moves) > 0 and bool(moves.phase.any())

    def at(self, step: int) -> ChunkMoves:
        """Return the moves of a step."""
        shift, table = self.shift, self.table
        times: NDArray[np.int64] | int = step
        if self.late:
            since = step - table[:, PHASE].astype(np.int64)
            active = np.flatnonzero((since >= 0) & (since < self.span))
            table, times = table[active], since[active]
        table = table.copy(order="F")
        for column, by, wrap in (
            (SRC_SLOT, shift.src_slot, shift.slot_wrap),
            (DST_SLOT, shift.dst_slot, shift.slot_wrap),
            (DST, shift.dst, shift.dst_wrap),
        ):
            if by:
                # Only what is left of a shift in a block is sure to fit into 32 bits.
                passed = times * by % wrap if wrap else times * by
                table[:, column] = _moved(table[:, column], passed, wrap)
        if len(self.order):
            for column in (SRC_SLOT, DST_SLOT):
                table[:, column] = _named(table[:, column], self.order)
        return ChunkMoves(table)


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective operation carried out by one algorithm."""

    name: str
    """The algorithm."""
    op: CollectiveOp
    """What it achieves."""
    ranks: int
    """Ranks that take part."""
    chunks: int
    """Equal parts that the message is cut into. The message is the larger of what one rank gives
    and what it gets."""
    slots: int
    """Slots of every place: those of the message first, then room for what passes through."""
    sweeps: tuple[Sweep, ...]
    """What happens, in order."""
    root: int = 0
    """The rank that gives or gets, where one does."""
    switches: tuple[str, ...] = ()
    """Places in the network that hold slots, numbered after the ranks."""
    counts: tuple[tuple[int, ...], ...] = ()
    """For all_to_all_v: the chunks that each rank (row) sends to each rank (column)."""
    peers: tuple[int, ...] = ()
    """For send_recv: the rank that each rank sends to; -1 for none."""

    @property
    def num_endpoints(self) -> int:
        """Ranks and switches."""
        return self.ranks + len(self.switches)

    @property
    def steps(self) -> int:
        """Steps from beginning to end."""
        return sum(sweep.steps for sweep in self.sweeps)

    @property
    def channels(self) -> int:
        """Parallel lanes between two places."""
        return 1 + max((int(s.moves.channel.max()) for s in self.sweeps if len(s.moves)), default=0)

    @property
    def moves(self) -> int:
        """Moves in all steps together."""
        return sum(sweep.span * len(sweep.moves) for sweep in self.sweeps)

    def iterate_steps(self) -> Iterator[tuple[int, ChunkMoves]]:
        """Go through the steps in order."""
        step = 0
        for sweep in self.sweeps:
            for moves in sweep.iterate_steps():
                yield step, moves
                step += 1

    def format_endpoint(self, place: int) -> str:
        """Return what people call a place."""
        if 0 <= place < self.ranks:
            return f"rank {place}"
        index = place - self.ranks
        return self.switches[index] if 0 <= index < len(self.switches) else f"place {place}"


def _named(slots: Ints, order: Ints) -> Ints:
    """Return the slots that numbers along an order stand for; beyond it they are slots."""
    inside = (slots >= 0) & (slots < len(order))
    if inside.all():
        return order[slots]
    return np.where(inside, order[np.where(inside, slots, 0)], slots)


def _moved(values: Ints, passed: NDArray[np.int64] | int, wrap: int) -> Ints:
    by = np.asarray(passed).astype(np.int32)
    if not wrap:
        return values + by
    # numpy's remainder takes the sign of the divisor, so shifts to the left wrap as well.
    inside = values % wrap
    return values - inside + (inside + by) % wrap
