"""What attempts held within a window, cut so that each piece is of one phase, node and state."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.fleet.account.claims import Claims
from meshwright.observe.fleet.account.phases import Phases
from meshwright.observe.fleet.account.places import Stretches
from meshwright.observe.fleet.account.ticks import Flags, Longs, Window


class Pieces(NamedTuple):
    """Times count from the beginning of the window."""

    attempt: Longs
    node: Longs
    gpu: Longs
    parts: Longs
    start: Longs
    end: Longs
    phase: Longs
    lost: Flags
    stretch: Longs
    """The stretch of its node that it lies in; -1 where nobody tells how the node stood."""
    amount: Longs
    """Parts times milliseconds."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.attempt)

    def where(self, chosen: Flags | Longs) -> "Pieces":
        """Return some of them."""
        return Pieces._make(column[chosen] for column in self)


def within(stretches: Stretches, window: Window) -> Stretches:
    """Return the stretches of a window, with times from its beginning."""
    inside = (stretches.since < window.until) & (stretches.until > window.since)
    found = Stretches(*(column[inside] for column in stretches))
    return found._replace(
        since=np.maximum(found.since, window.since) - window.since,
        until=np.minimum(found.until, window.until) - window.since,
    )


class Index(NamedTuple):
    """Claims in the order of their attempts, with where those of each begin."""

    claims: Claims
    first: Longs
    counts: Longs


def indexed(claims: Claims, attempts: int) -> Index:
    """Put claims into order."""
    order = np.argsort(claims.attempt, kind="stable")
    count = np.bincount(claims.attempt, minlength=attempts).astype(np.int64)
    return Index(Claims(*(column[order] for column in claims)), np.cumsum(count) - count, count)


def pieces(told: Phases, index: Index, stretches: Stretches, window: Window) -> Pieces:
    """Cut what is held in a window; `stretches` are those of the window."""
    inside = np.flatnonzero((told.start < window.until) & (told.end > window.since))
    attempt = told.attempt[inside]
    start = np.maximum(told.start[inside], window.since) - window.since
    end = np.minimum(told.end[inside], window.until) - window.since
    source, ordinal = expanded(index.counts[attempt])
    claim = index.first[attempt[source]] + ordinal
    claims = index.claims
    parts = claims.parts[claim]
    whole = Pieces(
        attempt[source], claims.node[claim], claims.gpu[claim], parts, start[source], end[source],
        told.phase[inside][source], told.lost[inside][source], np.full(len(claim), -1),
        parts * (end - start)[source],
    )  # fmt: skip
    return _by_state(whole.where(parts > 0), stretches, window)


def expanded(counts: Longs) -> tuple[Longs, Longs]:
    """Return, for so many copies of each row, the row and the number of the copy."""
    source = np.repeat(np.arange(len(counts)), counts)
    return source, np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)


def _by_state(whole: Pieces, stretches: Stretches, window: Window) -> Pieces:
    """Cut pieces where the state of their node changes; what no stretch covers stays as a rest."""
    if len(stretches.node) == 0 or whole.size == 0:
        return whole
    scale = window.span + 1
    since = stretches.node * scale + stretches.since
    until = stretches.node * scale + stretches.until
    base = np.where(whole.node >= 0, whole.node, 0) * scale
    low = np.searchsorted(until, base + whole.start, "right")
    high = np.searchsorted(since, base + whole.end, "left")
    counts = np.where(whole.node >= 0, np.maximum(0, high - low), 0)
    source, ordinal = expanded(counts)
    stretch = low[source] + ordinal
    cut = whole.where(source)
    start = np.maximum(cut.start, stretches.since[stretch])
    end = np.minimum(cut.end, stretches.until[stretch])
    cut = cut._replace(start=start, end=end, stretch=stretch, amount=cut.parts * (end - start))
    covered = np.zeros(whole.size, np.int64)
    np.add.at(covered, source, cut.amount)
    rest = whole._replace(amount=whole.amount - covered)
    left = rest.amount > 0
    if not left.any():
        return cut
    return Pieces(*(np.concatenate([a, b]) for a, b in zip(cut, rest.where(left), strict=True)))
