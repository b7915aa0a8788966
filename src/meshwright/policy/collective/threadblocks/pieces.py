"""Cuts the moves of a collective into pieces that lie in a row at both ends, buffers considered."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.policy.collective.collective import (
    ADDS,
    CHANNEL,
    DST,
    DST_SLOT,
    SRC,
    SRC_SLOT,
    Collective,
)
from meshwright.policy.collective.placement import Places, Spot


class Piece(NamedTuple):
    """Chunks that one rank sends another, or moves within itself."""

    step: int
    src: int
    dst: int
    channel: int
    adds: bool
    src_slot: int
    dst_slot: int
    length: int
    source: Spot
    """Where the first chunk is read."""
    base: Spot | None
    """Where the first chunk that it is added to lies; none for a copy."""
    target: Spot
    """Where the first chunk is put."""


def places_of(collective: Collective) -> list[Places]:
    """Return where the slots of every rank lie before anything has moved."""
    written: list[set[int]] = [set() for _ in range(collective.ranks)]
    for _, moves in collective.walk():
        for dst, slot, count in zip(
            moves.dst.tolist(), moves.dst_slot.tolist(), moves.count.tolist(), strict=True
        ):
            written[dst].update(range(slot, slot + count))
    return [Places(collective, rank, slots) for rank, slots in enumerate(written)]


def pieces(collective: Collective, places: list[Places], most: int) -> Iterator[Piece]:
    """Go through all pieces, step by step; none has more than `most` chunks."""
    for step, moves in collective.walk():
        rows = (
            moves.one_slot_each().table[:, (SRC, DST, CHANNEL, ADDS, SRC_SLOT, DST_SLOT)].tolist()
        )
        last: Piece | None = None
        written = []
        for src, dst, channel, adds, src_slot, dst_slot in sorted(rows):
            there = places[dst]
            written.append((there, dst_slot))
            base = there.now(dst_slot) if adds else None
            source, target = places[src].now(src_slot), there.later(dst_slot)
            one = Piece(
                step, src, dst, channel, bool(adds), src_slot, dst_slot, 1, source, base, target
            )
            if last is not None and last.length < most and _continues(last, one):
                last = last._replace(length=last.length + 1)
                continue
            if last is not None:
                yield last
            last = one
        if last is not None:
            yield last
        for there, slot in written:
            there.write(slot)


def _continues(last: Piece, one: Piece) -> bool:
    """Whether a chunk comes right after a piece, at both ends and in all buffers."""
    by = last.length
    return (
        one[:5] == last[:5]
        and one.src_slot == last.src_slot + by
        and one.dst_slot == last.dst_slot + by
        and one.source == _shifted(last.source, by)
        and one.base == (None if last.base is None else _shifted(last.base, by))
        and one.target == _shifted(last.target, by)
    )


def _shifted(spot: Spot, by: int) -> Spot:
    return Spot(spot.buffer, spot.chunk + by)
