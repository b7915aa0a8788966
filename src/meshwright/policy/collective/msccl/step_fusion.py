"""Sorts the events of a rank into lanes: one per peer and direction, or fused where data passes on.

A receive and the send of the very same chunks become one step when a lane takes from the one peer
and sends to the other. The sum that is sent on is not kept where nobody reads it again.
"""

from collections import Counter
from typing import NamedTuple

from meshwright.policy.collective.buffer_placement import BufferChunk, BufferPlacement
from meshwright.policy.collective.msccl.lowering_events import MessageEvent, ThreadBlockKey
from meshwright.policy.collective.msccl.lowering_messages import ChunkMessage
from meshwright.policy.collective.msccl.thread_block_program import StepKind


class UnlinkedStep(NamedTuple):
    """A step of a lane before its waits are known."""

    kind: StepKind
    src: BufferChunk | None
    dst: BufferChunk | None
    num_chunks: int
    events: tuple[int, ...]
    """The events that are over once it is."""


StepsByThreadBlock = dict[ThreadBlockKey, list[UnlinkedStep]]


def build_unfused_blocks(events: list[MessageEvent]) -> StepsByThreadBlock:
    """Return one lane per peer and direction, and lanes for what stays inside the rank."""
    lanes: StepsByThreadBlock = {}
    for number, event in enumerate(events):
        lanes.setdefault(event.key, []).extend(_items(number, event))
    return lanes


def build_fused_blocks(events: list[MessageEvent], places: BufferPlacement) -> StepsByThreadBlock:
    """Return lanes that pass on what they receive, as far as that is possible."""
    onward = _onward(events)
    partners = _partners(events, onward)
    keeps = _Keeps(events, places)
    lanes: StepsByThreadBlock = {}
    streams: dict[ThreadBlockKey, list[int]] = {}
    for number, event in enumerate(events):
        streams.setdefault(event.key, []).append(number)
    fused_keys = set(partners) | set(partners.values())
    for key, stream in streams.items():
        if key not in fused_keys:
            lanes[key] = [item for number in stream for item in _items(number, events[number])]
    for key, other in partners.items():
        joined = ThreadBlockKey(other.send_peer, key.recv_peer, key.channel)
        lanes[joined] = _merged(events, streams[key], streams[other], onward, keeps)
    return lanes


def _items(number: int, event: MessageEvent) -> list[UnlinkedStep]:
    piece = event.message
    done = (number,)
    if event.role == "send":
        return [UnlinkedStep("s", piece.source, None, piece.num_chunks, done)]
    if event.role == "receive":
        kind: StepKind = "rrc" if piece.adds else "r"
        return [UnlinkedStep(kind, piece.accumulator, piece.target, piece.num_chunks, done)]
    if not piece.adds:
        return [UnlinkedStep("cpy", piece.source, piece.target, piece.num_chunks, done)]
    adds = UnlinkedStep("re", piece.source, piece.target, piece.num_chunks, done)
    if piece.accumulator == piece.target:
        return [adds]
    return [UnlinkedStep("cpy", piece.accumulator, piece.target, piece.num_chunks, done), adds]


def _onward(events: list[MessageEvent]) -> dict[int, int]:
    """Return the first send that passes on exactly what a receive brought, by receive."""
    onward: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.role != "send" or len(event.depends_on) != 1:
            continue
        (giver,) = event.depends_on
        source = events[giver]
        if (
            source.role == "receive"
            and source.key.channel == event.key.channel
            and giver not in onward
            and _arrived(source.message) == _leaving(event.message)
        ):
            onward[giver] = number
    return onward


def _arrived(piece: ChunkMessage) -> tuple[int, int, BufferChunk]:
    return piece.dst_slot, piece.num_chunks, piece.target


def _leaving(piece: ChunkMessage) -> tuple[int, int, BufferChunk]:
    return piece.src_slot, piece.num_chunks, piece.source


def _partners(
    events: list[MessageEvent], onward: dict[int, int]
) -> dict[ThreadBlockKey, ThreadBlockKey]:
    """Pair lanes that receive with lanes that send, those that pass on most first."""
    weight = Counter((events[giver].key, events[taker].key) for giver, taker in onward.items())
    partners: dict[ThreadBlockKey, ThreadBlockKey] = {}
    for (giver, taker), _ in sorted(weight.items(), key=lambda pair: (-pair[1], pair[0])):
        if giver not in partners and taker not in partners.values():
            partners[giver] = taker
    return partners


def _merged(
    events: list[MessageEvent],
    receives: list[int],
    sends: list[int],
    onward: dict[int, int],
    keeps: "_Keeps",
) -> list[UnlinkedStep]:
    """Return the steps of a lane that receives one stream and sends the other."""
    items: list[UnlinkedStep] = []
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


def _in_order(events: list[MessageEvent], numbers: list[int]) -> list[UnlinkedStep]:
    ordered = sorted(numbers)
    return [item for number in ordered for item in _items(number, events[number])]


def _joint(events: list[MessageEvent], giver: int, taker: int, keeps: "_Keeps") -> UnlinkedStep:
    piece = events[giver].message
    done = giver, taker
    if not piece.adds:
        return UnlinkedStep("rcs", None, piece.target, piece.num_chunks, done)
    if keeps.needed(giver, taker):
        return UnlinkedStep("rrcs", piece.accumulator, piece.target, piece.num_chunks, done)
    return UnlinkedStep("rrs", piece.accumulator, None, piece.num_chunks, done)


class _Keeps:
    """Knows whether a sum is read again by anyone but the send that passes it on."""

    def __init__(self, events: list[MessageEvent], places: BufferPlacement) -> None:
        self.events, self.places = events, places
        self.uses: dict[int, list[int]] = {}
        for number, event in enumerate(events):
            piece = event.message
            if event.role in ("send", "local"):
                self._note(number, piece.src_slot, piece.num_chunks)
            if event.role in ("receive", "local"):
                self._note(number, piece.dst_slot, piece.num_chunks)

    def _note(self, number: int, first: int, count: int) -> None:
        for slot in range(first, first + count):
            self.uses.setdefault(slot, []).append(number)

    def needed(self, giver: int, taker: int) -> bool:
        """Whether what `giver` put into slots is used by more than `taker`."""
        piece = self.events[giver].message
        for slot in range(piece.dst_slot, piece.dst_slot + piece.num_chunks):
            uses = self.uses[slot]
            after = uses[uses.index(giver) + 1 :]
            if after[:1] != [taker]:
                return True
            if len(after) == 1:
                if slot in self.places.output_slots:
                    return True
            elif not self._overwrites(after[1], slot):
                return True
        return False

    def _overwrites(self, number: int, slot: int) -> bool:
        event = self.events[number]
        piece = event.message
        reads = event.role == "local" and slot in range(
            piece.src_slot, piece.src_slot + piece.num_chunks
        )
        return event.role in ("receive", "local") and not piece.adds and not reads
