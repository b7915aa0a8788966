"""What every rank has to do for the pieces of a collective, in order, and what waits for what."""

from itertools import groupby
from typing import Literal, NamedTuple

from meshwright.policy.collective.lanes import SlotOrder, Span
from meshwright.policy.collective.placement import Places
from meshwright.policy.collective.threadblocks.pieces import Piece

Role = Literal["send", "receive", "local", "fill"]
"""`fill` copies an input to the output that nobody writes otherwise."""


class LaneKey(NamedTuple):
    """What a lane is for: the rank it sends to, the rank it takes from (-1 for none), a channel."""

    send: int
    receive: int
    channel: int


class Event(NamedTuple):
    """One end of a piece."""

    role: Role
    key: LaneKey
    piece: Piece
    after: tuple[int, ...]
    """Earlier events of the same rank that must be over."""


def events_of(
    whole: list[Piece], places: list[Places], *, channels: int, most: int, most_count: int
) -> list[list[Event]]:
    """Return the events of every rank; no lane gets more than `most` of them."""
    cut = _spread(whole, channels, most)
    events = [_fills(rank, own, most_count) for rank, own in enumerate(places)]
    orders = [SlotOrder() for _ in places]
    for order, own in zip(orders, events, strict=True):
        for _ in own:
            order.take((), ())
    for _, group in groupby(cut, key=lambda piece: piece.step):
        here = list(group)
        # Nothing in a step depends on another part of it: what a rank gives, it gives first.
        for piece in here:
            if piece.src != piece.dst:
                key = LaneKey(piece.dst, -1, piece.channel)
                after = orders[piece.src].take(_read(piece), ())
                events[piece.src].append(Event("send", key, piece, after))
        for piece in here:
            if piece.src == piece.dst:
                key = LaneKey(-1, -1, piece.channel)
                after = orders[piece.src].take(_read(piece), _written(piece))
                events[piece.src].append(Event("local", key, piece, after))
        for piece in here:
            if piece.src != piece.dst:
                key = LaneKey(-1, piece.src, piece.channel)
                after = orders[piece.dst].take((), _written(piece))
                events[piece.dst].append(Event("receive", key, piece, after))
    return events


def _spread(cut: list[Piece], channels: int, most: int) -> list[Piece]:
    """Move what is too much for one lane to further channels, the same at both ends."""
    met: dict[tuple[int, int, int], int] = {}
    spread = []
    for piece in cut:
        local = piece.src == piece.dst
        link = piece.src, piece.dst, 0 if local else piece.channel
        number = met[link] = met.get(link, -1) + 1
        # An addition within a rank can take two steps, a copy and the addition.
        part = number // max(1, most // 2 if local else most)
        channel = part if local else piece.channel + channels * part
        spread.append(piece._replace(channel=channel))
    return spread


def _fills(rank: int, places: Places, most_count: int) -> list[Event]:
    events: list[Event] = []
    for slot, (source, target) in zip(places.never_written, places.copies(), strict=True):
        piece = Piece(-1, rank, rank, 0, False, slot, slot, 1, source, None, target)
        last = events[-1].piece if events else piece
        if events and last.length < most_count and last.src_slot + last.length == slot:
            events[-1] = events[-1]._replace(piece=last._replace(length=last.length + 1))
        else:
            events.append(Event("fill", LaneKey(-1, -1, 0), piece, ()))
    return events


def _read(piece: Piece) -> tuple[Span, ...]:
    return (Span(piece.src_slot, piece.length),)


def _written(piece: Piece) -> tuple[Span, ...]:
    return (Span(piece.dst_slot, piece.length),)
