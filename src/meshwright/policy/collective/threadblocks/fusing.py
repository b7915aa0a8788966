"""Sorts the events of a rank into lanes: one per peer and direction, or fused where data passes on.

A receive and the send of the very same chunks become one step when a lane takes from the one peer
and sends to the other. The sum that is sent on is not kept where nobody reads it again.
"""

from collections import Counter
from typing import NamedTuple

from meshwright.policy.collective.placement import Places, Spot
from meshwright.policy.collective.threadblocks.events import Event, LaneKey
from meshwright.policy.collective.threadblocks.pieces import Piece
from meshwright.policy.collective.threadblocks.program import StepKind


class Item(NamedTuple):
    """A step of a lane before its waits are known."""

    kind: StepKind
    src: Spot | None
    dst: Spot | None
    length: int
    events: tuple[int, ...]
    """The events that are over once it is."""


Lanes = dict[LaneKey, list[Item]]


def apart_lanes(events: list[Event]) -> Lanes:
    """Return one lane per peer and direction, and lanes for what stays inside the rank."""
    lanes: Lanes = {}
    for number, event in enumerate(events):
        lanes.setdefault(event.key, []).extend(_items(number, event))
    return lanes


def fused_lanes(events: list[Event], places: Places) -> Lanes:
    """Return lanes that pass on what they receive, as far as that is possible."""
    onward = _onward(events)
    partners = _partners(events, onward)
    keeps = _Keeps(events, places)
    lanes: Lanes = {}
    streams: dict[LaneKey, list[int]] = {}
    for number, event in enumerate(events):
        streams.setdefault(event.key, []).append(number)
    fused_keys = set(partners) | set(partners.values())
    for key, stream in streams.items():
        if key not in fused_keys:
            lanes[key] = [item for number in stream for item in _items(number, events[number])]
    for key, other in partners.items():
        joined = LaneKey(other.send, key.receive, key.channel)
        lanes[joined] = _merged(events, streams[key], streams[other], onward, keeps)
    return lanes


def _items(number: int, event: Event) -> list[Item]:
    piece = event.piece
    done = (number,)
    if event.role == "send":
        return [Item("s", piece.source, None, piece.length, done)]
    if event.role == "receive":
        kind: StepKind = "rrc" if piece.adds else "r"
        return [Item(kind, piece.base, piece.target, piece.length, done)]
    if not piece.adds:
        return [Item("cpy", piece.source, piece.target, piece.length, done)]
    adds = Item("re", piece.source, piece.target, piece.length, done)
    if piece.base == piece.target:
        return [adds]
    return [Item("cpy", piece.base, piece.target, piece.length, done), adds]


def _onward(events: list[Event]) -> dict[int, int]:
    """Return the first send that passes on exactly what a receive brought, by receive."""
    onward: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.role != "send" or len(event.after) != 1:
            continue
        (giver,) = event.after
        source = events[giver]
        if (
            source.role == "receive"
            and source.key.channel == event.key.channel
            and giver not in onward
            and _arrived(source.piece) == _leaving(event.piece)
        ):
            onward[giver] = number
    return onward


def _arrived(piece: Piece) -> tuple[int, int, Spot]:
    return piece.dst_slot, piece.length, piece.target


def _leaving(piece: Piece) -> tuple[int, int, Spot]:
    return piece.src_slot, piece.length, piece.source


def _partners(events: list[Event], onward: dict[int, int]) -> dict[LaneKey, LaneKey]:
    """Pair lanes that receive with lanes that send, those that pass on most first."""
    weight = Counter((events[giver].key, events[taker].key) for giver, taker in onward.items())
    partners: dict[LaneKey, LaneKey] = {}
    for (giver, taker), _ in sorted(weight.items(), key=lambda pair: (-pair[1], pair[0])):
        if giver not in partners and taker not in partners.values():
            partners[giver] = taker
    return partners


def _merged(
    events: list[Event],
    receives: list[int],
    sends: list[int],
    onward: dict[int, int],
    keeps: "_Keeps",
) -> list[Item]:
    """Return the steps of a lane that receives one stream and sends the other."""
    items: list[Item] = []
    place = {number: index for index, number in enumerate(sends)}
    waiting: list[int] = []
    at = 0
    for giver in receives:
        taker = onward.get(giver, -1)
        if place.get(taker, -1) < at:
            waiting.append(giver)
            continue
        before = sends[at : place[taker]]
        items += _in_order(events, waiting + before)
        items.append(_joint(events, giver, taker, keeps))
        at, waiting = place[taker] + 1, []
    return items + _in_order(events, waiting + sends[at:])


def _in_order(events: list[Event], numbers: list[int]) -> list[Item]:
    ordered = sorted(numbers)
    return [item for number in ordered for item in _items(number, events[number])]


def _joint(events: list[Event], giver: int, taker: int, keeps: "_Keeps") -> Item:
    piece = events[giver].piece
    done = giver, taker
    if not piece.adds:
        return Item("rcs", None, piece.target, piece.length, done)
    if keeps.needed(giver, taker):
        return Item("rrcs", piece.base, piece.target, piece.length, done)
    return Item("rrs", piece.base, None, piece.length, done)


class _Keeps:
    """Knows whether a sum is read again by anyone but the send that passes it on."""

    def __init__(self, events: list[Event], places: Places) -> None:
        self.events, self.places = events, places
        self.uses: dict[int, list[int]] = {}
        for number, event in enumerate(events):
            piece = event.piece
            if event.role in ("send", "local"):
                self._note(number, piece.src_slot, piece.length)
            if event.role in ("receive", "local"):
                self._note(number, piece.dst_slot, piece.length)

    def _note(self, number: int, first: int, count: int) -> None:
        for slot in range(first, first + count):
            self.uses.setdefault(slot, []).append(number)

    def needed(self, giver: int, taker: int) -> bool:
        """Whether what `giver` put into slots is used by more than `taker`."""
        piece = self.events[giver].piece
        for slot in range(piece.dst_slot, piece.dst_slot + piece.length):
            uses = self.uses[slot]
            after = uses[uses.index(giver) + 1 :]
            if after[:1] != [taker]:
                return True
            if len(after) == 1:
                if slot in self.places.wanted:
                    return True
            elif not self._overwrites(after[1], slot):
                return True
        return False

    def _overwrites(self, number: int, slot: int) -> bool:
        event = self.events[number]
        piece = event.piece
        reads = event.role == "local" and slot in range(
            piece.src_slot, piece.src_slot + piece.length
        )
        return event.role in ("receive", "local") and not piece.adds and not reads
