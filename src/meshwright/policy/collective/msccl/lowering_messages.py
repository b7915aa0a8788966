"""Cuts the moves of a collective into pieces that lie in a row at both ends, buffers considered."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.policy.collective.buffer_placement import BufferChunk, BufferPlacement
from meshwright.policy.collective.collective import (
    ADDS,
    CHANNEL,
    DST,
    DST_SLOT,
    SRC,
    SRC_SLOT,
    Collective,
)


class ChunkMessage(NamedTuple):
    """Chunks that one rank sends another, or moves within itself."""

    step: int
    src: int
    dst: int
    channel: int
    adds: bool
    src_slot: int
    dst_slot: int
    num_chunks: int
    source: BufferChunk
    """Where the first chunk is read."""
    accumulator: BufferChunk | None
    """Where the first chunk that it is added to lies; none for a copy."""
    target: BufferChunk
    """Where the first chunk is put."""


def list_buffer_placements(collective: Collective) -> list[BufferPlacement]:
    """Return where the slots of every rank lie before anything has moved."""
    written: list[set[int]] = [set() for _ in range(collective.ranks)]
    for _, moves in collective.iterate_steps():
        for dst, slot, count in zip(
            moves.dst.tolist(), moves.dst_slot.tolist(), moves.count.tolist(), strict=True
        ):
            written[dst].update(range(slot, slot + count))
    return [BufferPlacement(collective, rank, slots) for rank, slots in enumerate(written)]


def split_messages(
    collective: Collective, places: list[BufferPlacement], most: int
) -> Iterator[ChunkMessage]:
    """Go through all pieces, step by step; none has more than `most` chunks."""
    for step, moves in collective.iterate_steps():
        rows = (
            moves.split_by_slot().table[:, (SRC, DST, CHANNEL, ADDS, SRC_SLOT, DST_SLOT)].tolist()
        )
        last: ChunkMessage | None = None
        written = []
        for src, dst, channel, adds, src_slot, dst_slot in sorted(rows):
            there = places[dst]
            written.append((there, dst_slot))
            base = there.get_read_location(dst_slot) if adds else None
            source, target = (
                places[src].get_read_location(src_slot),
                there.get_write_location(dst_slot),
            )
            one = ChunkMessage(
                step, src, dst, channel, bool(adds), src_slot, dst_slot, 1, source, base, target
            )
            if last is not None and last.num_chunks < most and _continues(last, one):
                last = last._replace(num_chunks=last.num_chunks + 1)
                continue
            if last is not None:
                yield last
            last = one
        if last is not None:
            yield last
        for there, slot in written:
            there.record_write(slot)


def _continues(last: ChunkMessage, one: ChunkMessage) -> bool:
    """Whether a chunk comes right after a piece, at both ends and in all buffers."""
    by = last.num_chunks
    return (
        one[:5] == last[:5]
        and one.src_slot == last.src_slot + by
        and one.dst_slot == last.dst_slot + by
        and one.source == _shifted(last.source, by)
        and one.accumulator
        == (None if last.accumulator is None else _shifted(last.accumulator, by))
        and one.target == _shifted(last.target, by)
    )


def _shifted(spot: BufferChunk, by: int) -> BufferChunk:
    return BufferChunk(spot.buffer, spot.chunk + by)
