"""What all scored collectives say together: errors from 1 MiB on and below, by group."""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from meshwright.predict.validation.collectives.collective_score import ScoredCollective

MIB = 1 << 20
_PARTS: dict[str, Callable[[ScoredCollective], str]] = {
    "by_fabric": lambda row: row.fabric or "",
    "by_collective": lambda row: row.collective,
}


class CollectiveErrorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one group of rows, from 1 MiB on and below."""

    rows: int
    large: int
    """Rows from 1 MiB on."""
    large_median: float | None
    """Median of their errors, without the sign."""
    small: int
    """Rows below."""
    small_median: float | None
    within_25: float
    """Share of all rows within 25 %."""


class CollectiveErrorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of all rows and of their groups."""

    overall: CollectiveErrorGroup
    by_fabric: dict[str, CollectiveErrorGroup]
    by_collective: dict[str, CollectiveErrorGroup]
    skipped: dict[str, int]
    """Rows without a prediction, by reason."""
    unmeasured: int
    """Rows with a prediction and no usable measurement."""


def summarize_collectives(scored: Sequence[ScoredCollective]) -> CollectiveErrorSummary:
    """Return the errors overall, by fabric and by collective.

    Only rows with a size count: what experts exchange has none.
    """
    good = [row for row in scored if row.error is not None and row.size_bytes is not None]
    reasons = [row.skipped for row in scored if row.skipped is not None]
    return CollectiveErrorSummary(
        overall=summarize_group(good),
        skipped={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        unmeasured=sum(row.skipped is None and row.error is None for row in scored),
        **{part: _grouped_by(good, key) for part, key in _PARTS.items()},
    )


def summarize_group(rows: Iterable[ScoredCollective]) -> CollectiveErrorGroup:
    """Return the errors of some rows."""
    sized = [(row.size_bytes or 0, abs(row.error)) for row in rows if row.error is not None]
    large = [error for size, error in sized if size >= MIB]
    small = [error for size, error in sized if size < MIB]
    return CollectiveErrorGroup(
        rows=len(sized),
        large=len(large),
        large_median=statistics.median(large) if large else None,
        small=len(small),
        small_median=statistics.median(small) if small else None,
        within_25=sum(error <= 0.25 for _, error in sized) / max(1, len(sized)),
    )


def _grouped_by(
    rows: Sequence[ScoredCollective], key: Callable[[ScoredCollective], str]
) -> dict[str, CollectiveErrorGroup]:
    names = sorted({key(row) for row in rows})
    return {name: summarize_group(row for row in rows if key(row) == name) for name in names}
