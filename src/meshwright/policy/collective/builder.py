"""`CollectiveBuilder`: write an algorithm the way a textbook states it.

ring = CollectiveBuilder("ring", "all_reduce", ranks=n, chunks=n)
with ring.sweep(n - 1, shift=-1):
    for rank in range(n):
        ring.add(rank, (rank + 1) % n, chunk=rank)
with ring.sweep(n - 1, shift=-1):
    for rank in range(n):
        ring.copy(rank, (rank + 1) % n, chunk=(rank + 1) % n)
ring.build()
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import (
    ChunkMoves,
    Collective,
    CollectiveOp,
    Sweep,
    SweepShift,
)
from meshwright.policy.collective.contract import get_input_output_starts

MoveRow = tuple[int, int, int, int, int, int, int, int]
MAX_ROWS = 1 << 24
"""Moves that a value may state. More would not fit into memory; sweeps state them in fewer."""


class CollectiveBuilder:
    """Collects the moves of a collective, step by step."""

    def __init__(
        self,
        name: str,
        op: CollectiveOp,
        *,
        ranks: int,
        chunks: int,
        root: int = 0,
        switches: Sequence[str] = (),
        counts: Sequence[Sequence[int]] = (),
        peers: Sequence[int] = (),
    ) -> None:
        self._plain = Collective(
            name=name,
            op=op,
            ranks=ranks,
            chunks=chunks,
            slots=chunks,
            sweeps=(),
            root=root,
            switches=tuple(switches),
            counts=tuple(tuple(row) for row in counts),
            peers=tuple(peers),
        )
        self.output = get_input_output_starts(self._plain)[1]
        """The first slot of the output, where it has slots of its own."""
        held = chunks
        if op == "all_to_all_v":
            held = self.output + max(
                (sum(column) for column in zip(*counts, strict=True)), default=0
            )
        elif self.output:
            held = 2 * chunks
        self._slots = held
        self._sweeps: list[Sweep] = []
        self._rows = array("i")
        self._open = False
        self._made = 0
        """Moves stated so far, in all sweeps."""

    def allocate_scratch(self, slots: int) -> int:
        """Ask for slots beside the message, in every place; return the first."""
        first = self._slots
        self._slots += slots
        return first

    @contextmanager
    def step(self) -> Iterator[None]:
        """Collect the moves of one step."""
        with self.sweep(1):
            yield

    @contextmanager
    def step_in_order(self, order: Sequence[int]) -> Iterator[None]:
        """Collect the moves of one step whose slots are numbered along an order."""
        with self.sweep(1, order=order):
            yield

    @contextmanager
    def sweep(
        self,
        span: int,
        *,
        shift: int = 0,
        dst_shift: int = 0,
        dst_wrap: int = 0,
        wrap: int | None = None,
        arrival_shift: int | None = None,
        order: Sequence[int] = (),
    ) -> Iterator[None]:
        """Collect the moves of a step that is made `span` times.

        From one time to the next `shift` is added to the chunks, in blocks of `wrap` (the chunks
        of the message, where not given; 0 lets them run on), and `dst_shift` to the receivers, in
        blocks of `dst_wrap` (all ranks, where 0). `arrival_shift` moves the slot that is written
        where that differs from the slot that is read. With an `order`, chunk v stands for
        `order[v]`, and shifts go along the order.
        """
        if self._open:
            raise ValueError("a step cannot be opened inside another")
        self._open = True
        yield
        self._open = False
        if self._rows and span > 0:
            table = np.array(self._rows, dtype=np.int32).reshape(-1, 8)
            self._made += len(table)
            change = SweepShift(
                src_slot=shift,
                dst_slot=shift if arrival_shift is None else arrival_shift,
                dst=dst_shift,
                slot_wrap=(self._plain.chunks if wrap is None else wrap),
                dst_wrap=dst_wrap or self._plain.ranks,
                slot_order=() if list(order) == list(range(len(order))) else tuple(order),
            )
            steady = not (change.src_slot or change.dst_slot or change.dst or change.slot_order)
            sweep = Sweep(
                moves=ChunkMoves(table), span=span, shift=SweepShift() if steady else change
            )
            self._sweeps.append(sweep)
        self._rows = array("i")

    def copy(
        self,
        src: int,
        dst: int,
        *,
        chunk: int,
        to: int | None = None,
        count: int = 1,
        channel: int = 0,
        phase: int = 0,
    ) -> None:
        """Put chunks of one place into another (into the slots from `to` on, where given)."""
        arrives = chunk if to is None else to
        self._move((src, dst, chunk, arrives, count, 0, channel, phase))

    def add(
        self,
        src: int,
        dst: int,
        *,
        chunk: int,
        to: int | None = None,
        count: int = 1,
        channel: int = 0,
        phase: int = 0,
    ) -> None:
        """Add chunks of one place to what another holds."""
        arrives = chunk if to is None else to
        self._move((src, dst, chunk, arrives, count, 1, channel, phase))

    def _move(self, row: MoveRow) -> None:
        if not self._open:
            raise ValueError("moves belong to a step: put them into `with builder.step():`")
        if row[4] <= 0:
            return
        if self._made + len(self._rows) // 8 >= MAX_ROWS:
            what = f"{self._plain.name} over {self._plain.ranks} ranks takes more than "
            fix = "use fewer ranks, channels or pieces, or another algorithm"
            raise InputError([Problem("ranks", f"{what}{MAX_ROWS:,} stated moves", fix)])
        try:
            self._rows.extend(row)
        except OverflowError:
            what = f"{self._plain.name} moves {list(row)}, which 32 bits do not hold"
            raise InputError([Problem("chunks", what, "use fewer ranks or chunks")]) from None

    def build(self) -> Collective:
        """Return the collective."""
        plain = self._plain
        return Collective(
            name=plain.name,
            op=plain.op,
            ranks=plain.ranks,
            chunks=plain.chunks,
            slots=self._slots,
            sweeps=tuple(self._sweeps),
            root=plain.root,
            switches=plain.switches,
            counts=plain.counts,
            peers=plain.peers,
        )


def check_ring_order(order: Sequence[int] | None, ranks: int) -> tuple[int, ...]:
    """Return the order of ranks around a ring, checked: 0, 1, 2, … where none is given."""
    if order is None:
        return tuple(range(ranks))
    if sorted(order) != list(range(ranks)):
        what = f"{list(order)[:8]} does not name each of {ranks} ranks once"
        raise InputError([Problem("order", what, f"name the ranks 0 to {ranks - 1} in some order")])
    return tuple(order)
