"""`build_rank_program`: the ordered operations of one rank of a collective, with dependencies.

Moves of one step between the same two ranks on the same channel become one message. A rank sends
its messages to a peer on a channel in the order of its program, and the peer takes them in that
order; every action besides waits for the earlier ones it shares a slot with. Nothing else orders
actions. The program of one rank is made without those of the others.
"""

from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import (
    ADDS,
    CHANNEL,
    COUNT,
    DST,
    DST_SLOT,
    SRC,
    SRC_SLOT,
    ChunkMoves,
    Collective,
    Ints,
    Sweep,
)

RankActionKind = Literal["send", "receive", "receive_add", "copy", "add"]
"""`copy` and `add` stay inside the rank."""

_SEND, _LOCAL, _RECEIVE = range(3)


class SlotRange(NamedTuple):
    """Slots in a row."""

    first: int
    length: int


class RankAction(msgspec.Struct, frozen=True, kw_only=True):
    """One message that a rank sends or takes, or one thing it does by itself."""

    step: int
    """The step of the collective it comes from."""
    kind: RankActionKind
    peer: int
    """The other rank; the rank itself for `copy` and `add`."""
    channel: int
    reads: tuple[SlotRange, ...]
    """Own slots whose chunks are sent, copied or added, in the order of the message."""
    writes: tuple[SlotRange, ...]
    """Own slots that chunks are put into or added to, in the order of the message."""
    adds: bool
    """Whether chunks are added to what lies where they arrive; a send knows of its peer."""
    depends_on: tuple[int, ...]
    """Earlier actions of the program that must be over before this one begins."""

    @property
    def chunks(self) -> int:
        """Chunks in the message."""
        return sum(span.length for span in self.reads or self.writes)


class RankProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does."""

    rank: int
    slots: int
    """Slots that the rank needs."""
    actions: tuple[RankAction, ...]
    """In the order of the steps; in one step sends come first, receives last."""


def build_rank_program(collective: Collective, rank: int) -> RankProgram:
    """Return the program of one rank. Switches must have been hosted before."""
    if collective.switches:
        what = f"{collective.name} uses the switches {', '.join(collective.switches)}"
        fix = "give switches a host first, with lower_switches(collective)"
        raise InputError([Problem("switches", what, fix)])
    if not 0 <= rank < collective.ranks:
        what = f"there is no rank {rank} among {collective.ranks}"
        raise InputError([Problem("rank", what, f"use 0 to {collective.ranks - 1}")])
    steps, table = list_moves(collective, rank)
    actions: list[RankAction] = []
    order = SlotDependencies()
    for first, last in _messages(steps, table, rank):
        actions.append(_action(int(steps[first]), table[first:last], rank, order))
    return RankProgram(rank=rank, slots=collective.slots, actions=tuple(actions))


def build_rank_programs(collective: Collective) -> tuple[RankProgram, ...]:
    """Return the programs of all ranks."""
    return tuple(build_rank_program(collective, rank) for rank in range(collective.ranks))


def list_moves(collective: Collective, place: int) -> tuple[NDArray[np.int64], Ints]:
    """Return all moves that a place takes part in, with the step of each, sorted by step."""
    first, steps, tables = 0, [np.zeros(0, dtype=np.int64)], [np.zeros((0, 8), dtype=np.int32)]
    for stated in collective.sweeps:
        sweep = stated
        if sweep.shift.slot_order:  # slots in a row there need not be so in memory
            sweep = msgspec.structs.replace(stated, moves=stated.moves.split_by_slot())
        rows, times = _times_of(sweep, place)
        steps.append(first + times + sweep.moves.phase[rows])
        tables.append(sweep.shift.resolve_slot_order(ChunkMoves(_at(sweep, rows, times))).table)
        first += sweep.steps
    every, table = np.concatenate(steps), np.concatenate(tables)
    order = np.argsort(every, kind="stable")
    return every[order], table[order]


def _times_of(sweep: Sweep, place: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows of a sweep and which of their repetitions concern a place."""
    moves, shift, span = sweep.moves, sweep.shift, sweep.span
    sends = np.flatnonzero(moves.src == place)
    rows, times = [np.repeat(sends, span)], [np.tile(np.arange(span), len(sends))]
    others = np.flatnonzero(moves.src != place)
    dst = moves.dst[others].astype(np.int64)
    if not shift.dst:
        takes = others[dst == place]
        rows.append(np.repeat(takes, span))
        times.append(np.tile(np.arange(span), len(takes)))
        return np.concatenate(rows), np.concatenate(times)
    # A row reaches the place whenever the shift so far makes up the difference.
    passed, wanted = np.arange(span, dtype=np.int64) * shift.dst, place - dst
    if shift.dst_wrap:
        same = dst // shift.dst_wrap == place // shift.dst_wrap
        others, wanted = others[same], wanted[same] % shift.dst_wrap
        passed %= shift.dst_wrap
    by_shift = np.argsort(passed, kind="stable")
    low = np.searchsorted(passed[by_shift], wanted, side="left")
    hits = np.searchsorted(passed[by_shift], wanted, side="right") - low
    index = np.arange(int(hits.sum())) - np.repeat(np.cumsum(hits) - hits, hits)
    rows.append(np.repeat(others, hits))
    times.append(by_shift[np.repeat(low, hits) + index])
    return np.concatenate(rows), np.concatenate(times)


def _at(sweep: Sweep, rows: NDArray[np.int64], times: NDArray[np.int64]) -> Ints:
    """Return rows of a sweep as they are at the given repetitions."""
    table, shift = sweep.moves.table[rows], sweep.shift
    for column, by, wrap in (
        (SRC_SLOT, shift.src_slot, shift.slot_wrap),
        (DST_SLOT, shift.dst_slot, shift.slot_wrap),
        (DST, shift.dst, shift.dst_wrap),
    ):
        if by:
            table[:, column] = _moved(table[:, column].astype(np.int64), times * by, wrap)
    return table


def _moved(values: NDArray[np.int64], by: NDArray[np.int64], wrap: int) -> NDArray[np.int64]:
    if not wrap:
        return values + by
    return values - values % wrap + (values % wrap + by) % wrap


def _messages(steps: NDArray[np.int64], table: Ints, rank: int) -> list[tuple[int, int]]:
    """Sort the moves of a rank into messages, in place; return where each begins and ends."""
    if not len(table):
        return []
    local = (table[:, SRC] == rank) & (table[:, DST] == rank)
    way = np.where(local, _LOCAL, np.where(table[:, SRC] == rank, _SEND, _RECEIVE))
    peer = np.where(way == _SEND, table[:, DST], table[:, SRC])
    # Both ends sort by the same columns, so they agree on the order inside a message.
    keys = (steps, way, peer, table[:, CHANNEL], table[:, ADDS])
    order = np.lexsort((table[:, DST_SLOT], table[:, SRC_SLOT], *reversed(keys)))
    sorted_keys = np.column_stack(keys)[order]
    steps[:], table[:] = steps[order], table[order]
    begins = np.flatnonzero(np.any(sorted_keys[1:] != sorted_keys[:-1], axis=1)) + 1
    edges = [0, *begins.tolist(), len(table)]
    return list(pairwise(edges))


def _action(step: int, rows: Ints, rank: int, order: "SlotDependencies") -> RankAction:
    src, dst = int(rows[0, SRC]), int(rows[0, DST])
    adds = bool(rows[0, ADDS])
    reads = _spans(rows[:, SRC_SLOT], rows[:, COUNT]) if src == rank else ()
    writes = _spans(rows[:, DST_SLOT], rows[:, COUNT]) if dst == rank else ()
    kind: RankActionKind
    if src == rank == dst:
        kind = "add" if adds else "copy"
    elif src == rank:
        kind = "send"
    else:
        kind = "receive_add" if adds else "receive"
    return RankAction(
        step=step,
        kind=kind,
        peer=dst if src == rank else src,
        channel=int(rows[0, CHANNEL]),
        reads=reads,
        writes=writes,
        adds=adds,
        depends_on=order.add_action(reads, writes),
    )


def _spans(firsts: Ints, counts: Ints) -> tuple[SlotRange, ...]:
    """Join what lies in a row."""
    spans: list[SlotRange] = []
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        if spans and spans[-1].first + spans[-1].length == first:
            spans[-1] = SlotRange(spans[-1].first, spans[-1].length + count)
        else:
            spans.append(SlotRange(first, count))
    return tuple(spans)


class SlotDependencies:
    """Remembers who wrote and who read each slot, to say what an action has to wait for."""

    def __init__(self) -> None:
        self._actions = 0
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}

    def add_action(
        self, reads: tuple[SlotRange, ...], writes: tuple[SlotRange, ...]
    ) -> tuple[int, ...]:
        """Count one more action; return those before it that it depends on."""
        number, waits = self._actions, set()
        self._actions += 1
        for slot in expand_slots(reads):
            if slot in self._writer:
                waits.add(self._writer[slot])
            self._readers.setdefault(slot, []).append(number)
        for slot in expand_slots(writes):
            # Readers waited for the writer before them, so waiting for them is enough.
            before = self._readers.pop(slot, None)
            if before:
                waits.update(before)
            elif slot in self._writer:
                waits.add(self._writer[slot])
            self._writer[slot] = number
        return tuple(sorted(waits - {number}))


def expand_slots(spans: tuple[SlotRange, ...]) -> list[int]:
    """Return the slots of spans one by one."""
    return [slot for span in spans for slot in range(span.first, span.first + span.length)]
