"""Draws a simulated collective as a `Timeline`: a send and a receive for every move.

A rank has one lane per peer, channel and direction; moves that share a lane follow each other, as
they do on the wire. What a rank copies or adds within its own memory is one span. Switches that
hold data are drawn as ranks behind the last one. Names are those of measured collectives.
"""

from typing import TYPE_CHECKING

import numpy as np

from meshwright.policy.collective.collective import (
    ADDS,
    CHANNEL,
    COUNT,
    DST,
    DST_SLOT,
    SRC,
    SRC_SLOT,
)
from meshwright.policy.collective.collective_spans import (
    SPAN_NAMES,
    TORCH_CALLS,
    TransferDirection,
    encode_span_details,
    format_lane_name,
)
from meshwright.timeline import DictionaryColumn, SpanKind, Timeline

if TYPE_CHECKING:
    from meshwright.predict.collective.simulation import SimulatedCollective

_WAYS: tuple[TransferDirection, ...] = ("send", "receive", "local")
_KINDS = {
    "send": SpanKind.COMMUNICATION.value,
    "receive": SpanKind.COMMUNICATION.value,
    "local": SpanKind.MEMORY_COPY.value,
}


def build_collective_timeline(result: "SimulatedCollective") -> Timeline:
    """Return the spans of every move that was kept."""
    assert result.move_times is not None
    waves = [wave for wave in result.move_times if len(wave.moves)]
    if not waves:
        return Timeline.empty("simulated")
    table = np.concatenate([wave.moves.table for wave in waves]).astype(np.int64)
    step = np.repeat([wave.step for wave in waves], [len(wave.moves) for wave in waves])
    start = np.concatenate([wave.start_s for wave in waves]) + result.base_s
    end = np.concatenate([wave.end_s for wave in waves]) + result.base_s
    start_ns = np.rint(start * 1e9).astype(np.int64)
    length_ns = np.maximum(np.rint(end * 1e9).astype(np.int64) - start_ns, 0)
    inside = table[:, SRC] == table[:, DST]
    moved, stayed = np.flatnonzero(~inside), np.flatnonzero(inside)
    # A row of the timeline is one end of a move: which move, and which way.
    row = np.concatenate((moved, moved, stayed))
    way = np.repeat(np.arange(3), (len(moved), len(moved), len(stayed)))
    ends, receives = table[row], way == _WAYS.index("receive")
    slot = np.where(receives, ends[:, DST_SLOT], ends[:, SRC_SLOT])
    peer = np.where(receives, ends[:, SRC], ends[:, DST])
    columns: dict[str, object] = {
        "rank": np.where(receives, ends[:, DST], ends[:, SRC]),
        "lane": _lanes(way, peer, ends[:, CHANNEL]),
        "start_ns": start_ns[row],
        "duration_ns": length_ns[row],
        "name": DictionaryColumn(ends[:, ADDS], SPAN_NAMES),
        "bytes": np.rint(ends[:, COUNT] * result.chunk_bytes).astype(np.int64),
        "flow_out": np.where(way == _WAYS.index("send"), row, -1),
        "flow_in": np.where(receives, row, -1),
        "collective": _by_way([TORCH_CALLS[each] for each in _WAYS], way),
        "extra": _details(step[row], slot, ends[:, COUNT]),
        "process": "gpu",
        "kind": _by_way([_KINDS[each] for each in _WAYS], way),
        "group": result.op,
    }
    metadata = {
        "collective": result.op,
        "algorithm": result.algorithm,
        "network": result.network,
        "ranks": str(result.ranks),
        "bytes": repr(result.nbytes),
        "seconds": repr(result.seconds),
    }
    return Timeline.from_columns(columns, source="simulated", metadata=metadata)


def _by_way(words: list[str | None], way: np.ndarray) -> DictionaryColumn:
    known = list(dict.fromkeys(word for word in words if word is not None))
    codes = np.array([-1 if word is None else known.index(word) for word in words])
    return DictionaryColumn(codes[way], known)


def _lanes(way: np.ndarray, peer: np.ndarray, channel: np.ndarray) -> DictionaryColumn:
    kinds, which = _distinct(way, peer, channel)
    known: dict[str, int] = {}
    numbers = [
        known.setdefault(format_lane_name(_WAYS[one], place, lane), len(known))
        for one, place, lane in kinds.tolist()
    ]
    return DictionaryColumn(np.array(numbers)[which], list(known))


def _details(step: np.ndarray, slot: np.ndarray, count: np.ndarray) -> DictionaryColumn:
    kinds, which = _distinct(step, slot, count)
    return DictionaryColumn(which, [encode_span_details(*each) for each in kinds.tolist()])


def _distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows, and which of them each row is: text is made once for each."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return np.column_stack(columns)[first], which
