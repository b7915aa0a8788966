"""A rank's device work drawn small: how full each stream is, piece by piece, and its longest spans.

The size does not depend on the trace: a picture of a minute and one of a day weigh the same.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent, select_counted_spans
from meshwright.observe.analyze.spans.device_spans import DEVICE_KINDS
from meshwright.observe.analyze.spans.intervals import (
    DeviceSpans,
    Flags,
    Ints,
    measure_covered_ns,
    union,
)
from meshwright.timeline.timeline import Timeline

NUM_BINS = 4096
NUM_LANES = 6
NUM_SPANS = 1200
NUM_LEVELS = 63
"""How full a piece is, in this many steps; the kind of work is the byte's upper two bits."""


class StripLane(NamedTuple):
    """One stream."""

    label: str
    bins: bytes
    """A byte for each piece: the kind that ran longest times 64, plus how full it was, 0 to 63."""


class StripSpan(NamedTuple):
    """One of the longest spans."""

    lane: int
    start_ns: int
    duration_ns: int
    kind: int
    """Place in `DEVICE_KINDS`."""
    name: str


class TimelineStrip(NamedTuple):
    """The picture of one rank."""

    rank: int
    start_ns: int
    end_ns: int
    lanes: tuple[StripLane, ...]
    """The busiest streams."""
    spans: tuple[StripSpan, ...]
    """The longest, in the order of time; shorter ones show in the bins only."""
    num_spans: int
    """How many spans there are."""


def build_strip(part: Timeline, extent: AnalysisExtent = AnalysisExtent.WINDOW) -> TimelineStrip:
    """Draw one rank small."""
    spans = select_counted_spans(part, extent)
    low, high = spans.window_ns
    edges = np.linspace(low, high, NUM_BINS + 1).astype(np.int64)
    length = spans.end - spans.start
    total = np.bincount(spans.lane, weights=length, minlength=len(spans.lanes))
    busiest = np.sort(np.argsort(-total, kind="stable")[:NUM_LANES])
    lanes = tuple(
        StripLane(spans.lanes[lane], _bins(spans, spans.lane == lane, edges))
        for lane in busiest.tolist()
    )
    place = np.full(len(spans.lanes) + 1, -1)
    place[busiest] = np.arange(busiest.size)
    shown = np.flatnonzero(place[spans.lane] >= 0)
    longest = np.sort(shown[np.argsort(-length[shown], kind="stable")[:NUM_SPANS]])
    return TimelineStrip(
        rank=part.ranks[0] if part.ranks else 0,
        start_ns=low,
        end_ns=high,
        lanes=lanes,
        spans=tuple(
            StripSpan(
                int(place[spans.lane[one]]),
                int(spans.start[one]),
                int(length[one]),
                int(spans.kind[one]),
                spans.names[spans.name[one]],
            )
            for one in longest.tolist()
        ),
        num_spans=int(spans.row.size),
    )


def _bins(spans: DeviceSpans, own: Flags, edges: Ints) -> bytes:
    """How full each piece between edges is, and with what."""
    begin, end = edges[:-1], edges[1:]
    by_kind = np.stack(
        [
            measure_covered_ns(union(spans.start[chosen], spans.end[chosen]), begin, end)
            for kind in range(len(DEVICE_KINDS))
            if (chosen := own & (spans.kind == kind)) is not None
        ]
    )
    wide = np.maximum(end - begin, 1)
    full = np.minimum(by_kind.sum(axis=0) / wide, 1.0)
    # A piece in which anything ran at all is never drawn empty.
    level = np.ceil(full * NUM_LEVELS).astype(np.uint8)
    filled: bytes = (by_kind.argmax(axis=0).astype(np.uint8) * np.uint8(64) + level).tobytes()
    return filled
