"""What every rank has to do for the pieces of a collective, in order, and what waits for what."""

from itertools import groupby
from typing import Literal, NamedTuple

from meshwright.policy.collective.buffer_placement import BufferPlacement
from meshwright.policy.collective.msccl.lowering_messages import ChunkMessage
from meshwright.policy.collective.rank_program import SlotDependencies, SlotRange

EventRole = Literal["send", "receive", "local", "fill"]
"""`fill` copies an input to the output that nobody writes otherwise."""


class ThreadBlockKey(NamedTuple):
    """What a lane is for: the rank it sends to, the rank it takes from (-1 for none), a channel."""

    send_peer: int
    recv_peer: int
    channel: int


class MessageEvent(NamedTuple):
    """One end of a piece."""

    role: EventRole
    key: ThreadBlockKey
    message: ChunkMessage
    depends_on: tuple[int, ...]
    """Earlier events of the same rank that must be over."""


def list_events(
    whole: list[ChunkMessage],
    places: list[BufferPlacement],
    *,
    channels: int,
    most: int,
    most_count: int,
) -> list[list[MessageEvent]]:
    """Return the events of every rank; no lane gets more than `most` of them."""
    cut = _spread(whole, channels, most)
    events = [_fills(rank, own, most_count) for rank, own in enumerate(places)]
    orders = [SlotDependencies() for _ in places]
    for order, own in zip(orders, events, strict=True):
        for _ in own:
            order.add_action((), ())
    for _, group in groupby(cut, key=lambda piece: piece.step):
        here = list(group)
        # Nothing in a step depends on another part of it: what a rank gives, it gives first.
        for piece in here:
            if piece.src != piece.dst:
                key = ThreadBlockKey(piece.dst, -1, piece.channel)
                after = orders[piece.src].add_action(_read(piece), ())
                events[piece.src].append(MessageEvent("send", key, piece, after))
        for piece in here:
            if piece.src == piece.dst:
                key = ThreadBlockKey(-1, -1, piece.channel)
                after = orders[piece.src].add_action(_read(piece), _written(piece))
                events[piece.src].append(MessageEvent("local", key, piece, after))
        for piece in here:
            if piece.src != piece.dst:
                key = ThreadBlockKey(-1, piece.src, piece.channel)
                after = orders[piece.dst].add_action((), _written(piece))
                events[piece.dst].append(MessageEvent("receive", key, piece, after))
    return events


def _spread(cut: list[ChunkMessage], channels: int, most: int) -> list[ChunkMessage]:
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


def _fills(rank: int, places: BufferPlacement, most_count: int) -> list[MessageEvent]:
    events: list[MessageEvent] = []
    for slot, (source, target) in zip(places.unwritten_outputs, places.list_copies(), strict=True):
        piece = ChunkMessage(-1, rank, rank, 0, False, slot, slot, 1, source, None, target)
        last = events[-1].message if events else piece
        if events and last.num_chunks < most_count and last.src_slot + last.num_chunks == slot:
            events[-1] = events[-1]._replace(message=last._replace(num_chunks=last.num_chunks + 1))
        else:
            events.append(MessageEvent("fill", ThreadBlockKey(-1, -1, 0), piece, ()))
    return events


def _read(piece: ChunkMessage) -> tuple[SlotRange, ...]:
    return (SlotRange(piece.src_slot, piece.num_chunks),)


def _written(piece: ChunkMessage) -> tuple[SlotRange, ...]:
    return (SlotRange(piece.dst_slot, piece.num_chunks),)
