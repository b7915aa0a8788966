"""Work that only moves bytes, and launching: constants with a closed meaning, few rows each."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.calibrate.fit_score import FOLDS, FitScore, score_by_part, score_predictions
from meshwright.observe.calibrate.least_squares import fit_log_constants
from meshwright.predict.cost.curves import MEMORY_OPS, LaunchCurve, MemoryCurve, max_bandwidth_share

Array = Any

_KERNEL_S = (2e-6, 2e-7, 5e-5)
"""Start, least and most of what an elementwise kernel takes besides its bytes."""
_SHARE, _LEAST_SHARE = 0.8, 0.005
LAUNCHES = {"host": "host_s", "graph": "graph_s", "kernel": "kernel_s"}
"""Cases of `launches` that hold a field of a `LaunchCurve`: time of the host for one kernel and
for replaying one graph, and of an empty kernel on the device."""
LAYERS = {
    ("layer_forward", "dense"): "layer_s",
    ("layer_backward", "dense"): "layer_backward_s",
    ("layer_forward", "experts"): "experts_s",
    ("layer_backward", "experts"): "experts_backward_s",
}
"""The same of whole layers, by what they are."""
_LAYER_NAMES = frozenset(name for name, _ in LAYERS)


class BandwidthModel(NamedTuple):
    """How fast each class of work moves its bytes."""

    kernel_s: float
    """What a kernel takes besides."""
    shares: Mapping[str, float]
    bytes_per_s: float

    def predict_seconds(self, rows: Sequence[BenchRow]) -> Array:
        """Return what the cost model says of rows."""
        return np.array(
            [
                self.kernel_s + (row.bytes or 0.0) / (self.shares[row.case.name] * self.bytes_per_s)
                for row in rows
            ]
        )


class BandwidthFit(NamedTuple):
    """What was made of rows that move bytes."""

    curves: tuple[MemoryCurve, ...]
    kernel_s: float | None
    in_sample: FitScore
    """On the rows that were fitted."""
    cross_validated: FitScore | None
    """Each row predicted from a fit without it; None where rows are too few."""
    by_part: dict[str, FitScore]
    """The same by class."""
    validation: FitScore | None
    """On rows of another file."""
    validation_by_part: dict[str, FitScore]


def fit_bandwidth(
    rows: Sequence[BenchRow], bytes_per_s: float, source: str, held: Sequence[BenchRow] = ()
) -> BandwidthFit | None:
    """Fit the share of the bandwidth for each class, and one start-up time for all."""
    mine = _mine(rows)
    if not mine:
        return None
    found = _fit(mine, bytes_per_s)
    curves = tuple(
        MemoryCurve(op=op, efficiency=round(found.shares[op], 4), source=source)
        for op in MEMORY_OPS
        if op in found.shares
    )
    # Rows of one size each cannot tell a start-up time from a slower stream.
    sized = len({(row.case.name, row.bytes) for row in mine}) > len(found.shares)
    left, left_s = _folded(mine, bytes_per_s)
    others = [row for row in _mine(held) if row.case.name in found.shares]
    others_s = found.predict_seconds(others)
    return BandwidthFit(
        curves=curves,
        kernel_s=float(f"{found.kernel_s:.4g}") if sized else None,
        in_sample=score_predictions(mine, found.predict_seconds(mine)),
        cross_validated=score_predictions(left, left_s) if left else None,
        by_part=score_by_part(left, left_s),
        validation=score_predictions(others, others_s) if others else None,
        validation_by_part=score_by_part(others, others_s),
    )


def _mine(rows: Sequence[BenchRow]) -> list[BenchRow]:
    return [
        row
        for row in rows
        if row.case.family == "memory_bound" and row.case.name in MEMORY_OPS and row.bytes
    ]


def _fit(rows: Sequence[BenchRow], bytes_per_s: float) -> BandwidthModel:
    ops = [op for op in MEMORY_OPS if any(row.case.name == op for row in rows)]
    place = np.array([[op == row.case.name for op in ops].index(True) for row in rows])
    moved = np.array([row.bytes for row in rows], dtype=float)

    def seconds(values: Array) -> Array:
        return values[0] + moved / (values[1:][place] * bytes_per_s)

    free = [_KERNEL_S, *((_SHARE, _LEAST_SHARE, max_bandwidth_share(op)) for op in ops)]
    times = np.array([row.median_s for row in rows])
    # A step is made of large kernels: within its class, a row counts by the root of its time.
    weights = np.sqrt(times)
    for one in range(len(ops)):
        weights[place == one] /= weights[place == one].mean()
    found, _ = fit_log_constants(seconds, times, free, weights)
    shares = dict(zip(ops, found[1:].tolist(), strict=True))
    return BandwidthModel(float(found[0]), shares, bytes_per_s)


def _folded(rows: Sequence[BenchRow], bytes_per_s: float) -> tuple[list[BenchRow], Array]:
    """Predict each row from a fit without its fifth of all rows, where others have its class."""
    left, seconds = list[BenchRow](), list[float]()
    if len(rows) < 2 * FOLDS:
        return left, seconds
    for fold in range(FOLDS):
        kept = [row for place, row in enumerate(rows) if place % FOLDS != fold]
        found = _fit(kept, bytes_per_s)
        out = [row for row in rows[fold::FOLDS] if row.case.name in found.shares]
        left += out
        seconds += found.predict_seconds(out).tolist()
    return left, np.array(seconds)


def fit_launch(
    rows: Sequence[BenchRow], kernel_s: float | None, default: LaunchCurve, source: str
) -> LaunchCurve | None:
    """Return launching as measured, the rest as it was; None where nothing was."""
    found = {
        field: median(times)
        for name, field in LAUNCHES.items()
        if (times := [row.median_s for row in _launches(rows) if row.case.name == name])
    }
    if kernel_s is not None:
        found["kernel_s"] = kernel_s
    found |= {
        field: row.median_s
        for row in rows
        if row.case.family == "launch_overhead" and row.median_s > 0
        and (field := LAYERS.get((row.case.name, str(row.case.sizes.get("kind")))))
    }  # fmt: skip
    if not found:
        return None
    known = {name: getattr(default, name) for name in LAUNCHES.values()}
    return LaunchCurve(**{**known, **found}, source=source)


def score_launch(rows: Sequence[BenchRow], launch: LaunchCurve | None) -> FitScore | None:
    """Say how far launches scatter around their own middle; None without rows.

    Each figure is the middle of one row, or of rows of different operations, so that nothing is
    predicted here. What can be told is how well a figure repeats: half of how far the middle eight
    tenths of a row's samples lie apart.
    """
    mine = [
        row
        for row in rows
        if row.case.family == "launch_overhead" and row.median_s > 0
        and (row.case.name in LAUNCHES or row.case.name in _LAYER_NAMES)
    ]  # fmt: skip
    if launch is None or not mine:
        return None
    apart = np.array([row.relative_spread / 2 for row in mine])
    worst = int(apart.argmax())
    return FitScore(
        num_rows=len(mine),
        median=float(np.median(apart)),
        p95=float(np.quantile(apart, 0.95)),
        mean=float(apart.mean()),
        bias=0.0,
        worst_error=float(apart[worst]),
        worst_case=mine[worst].case.key,
    )


def _launches(rows: Sequence[BenchRow]) -> list[BenchRow]:
    return [
        row
        for row in rows
        if row.case.family == "launch_overhead" and row.case.name in LAUNCHES and row.median_s > 0
    ]
