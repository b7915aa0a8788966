"""What attempts held within a window, cut so that each piece is of one phase, node and state."""

from typing import NamedTuple

import numpy as np

from meshwright.fleet.account.allocations import GpuAllocations
from meshwright.fleet.account.inventory import NodeStateSpans
from meshwright.fleet.account.phases import AttemptPhases
from meshwright.fleet.account.ticks import Flags, Ints, TickWindow


class AllocationSegments(NamedTuple):
    """Times count from the beginning of the window."""

    attempt: Ints
    node: Ints
    gpu: Ints
    gpu_parts: Ints
    start_ms: Ints
    end_ms: Ints
    phase: Ints
    is_lost: Flags
    span: Ints
    """The stretch of its node that it lies in; -1 where nobody tells how the node stood."""
    part_ms: Ints
    """Parts times milliseconds."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.attempt)

    def select(self, chosen: Flags | Ints) -> "AllocationSegments":
        """Return some of them."""
        return AllocationSegments._make(column[chosen] for column in self)


def clip_spans(stretches: NodeStateSpans, window: TickWindow) -> NodeStateSpans:
    """Return the stretches of a window, with times from its beginning."""
    inside = (stretches.since_ms < window.until_ms) & (stretches.until_ms > window.since_ms)
    found = NodeStateSpans(*(column[inside] for column in stretches))
    return found._replace(
        since_ms=np.maximum(found.since_ms, window.since_ms) - window.since_ms,
        until_ms=np.minimum(found.until_ms, window.until_ms) - window.since_ms,
    )


class AllocationIndex(NamedTuple):
    """Claims in the order of their attempts, with where those of each begin."""

    allocations: GpuAllocations
    first_row: Ints
    counts: Ints


def index_allocations(claims: GpuAllocations, attempts: int) -> AllocationIndex:
    """Put claims into order."""
    order = np.argsort(claims.attempt, kind="stable")
    count = np.bincount(claims.attempt, minlength=attempts).astype(np.int64)
    return AllocationIndex(
        GpuAllocations(*(column[order] for column in claims)), np.cumsum(count) - count, count
    )


def build_segments(
    told: AttemptPhases, index: AllocationIndex, stretches: NodeStateSpans, window: TickWindow
) -> AllocationSegments:
    """Cut what is held in a window; `stretches` are those of the window."""
    inside = np.flatnonzero((told.start_ms < window.until_ms) & (told.end_ms > window.since_ms))
    attempt = told.attempt[inside]
    start = np.maximum(told.start_ms[inside], window.since_ms) - window.since_ms
    end = np.minimum(told.end_ms[inside], window.until_ms) - window.since_ms
    source, ordinal = expand_rows(index.counts[attempt])
    claim = index.first_row[attempt[source]] + ordinal
    claims = index.allocations
    parts = claims.gpu_parts[claim]
    whole = AllocationSegments(
        attempt[source], claims.node[claim], claims.gpu[claim], parts, start[source], end[source],
        told.phase[inside][source], told.is_lost[inside][source], np.full(len(claim), -1),
        parts * (end - start)[source],
    )  # fmt: skip
    return _by_state(whole.select(parts > 0), stretches, window)


def expand_rows(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for so many copies of each row, the row and the number of the copy."""
    source = np.repeat(np.arange(len(counts)), counts)
    return source, np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)


def _by_state(
    whole: AllocationSegments, stretches: NodeStateSpans, window: TickWindow
) -> AllocationSegments:
    """Cut pieces where the state of their node changes; what no stretch covers stays as a rest."""
    if len(stretches.node) == 0 or whole.size == 0:
        return whole
    scale = window.duration_ms + 1
    since = stretches.node * scale + stretches.since_ms
    until = stretches.node * scale + stretches.until_ms
    base = np.where(whole.node >= 0, whole.node, 0) * scale
    low = np.searchsorted(until, base + whole.start_ms, "right")
    high = np.searchsorted(since, base + whole.end_ms, "left")
    counts = np.where(whole.node >= 0, np.maximum(0, high - low), 0)
    source, ordinal = expand_rows(counts)
    stretch = low[source] + ordinal
    cut = whole.select(source)
    start = np.maximum(cut.start_ms, stretches.since_ms[stretch])
    end = np.minimum(cut.end_ms, stretches.until_ms[stretch])
    cut = cut._replace(
        start_ms=start, end_ms=end, span=stretch, part_ms=cut.gpu_parts * (end - start)
    )
    covered = np.zeros(whole.size, np.int64)
    np.add.at(covered, source, cut.part_ms)
    rest = whole._replace(part_ms=whole.part_ms - covered)
    left = rest.part_ms > 0
    if not left.any():
        return cut
    return AllocationSegments(
        *(np.concatenate([a, b]) for a, b in zip(cut, rest.select(left), strict=True))
    )
