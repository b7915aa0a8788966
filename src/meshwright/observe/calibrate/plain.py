"""Work that only moves bytes, and launching: constants with a closed meaning, few rows each."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.bench.case import Row
from meshwright.observe.calibrate.score import Score, score
from meshwright.observe.calibrate.solve import fit_logs
from meshwright.predict.cost.curves import MEMORY_OPS, LaunchCurve, MemoryCurve

Array = Any

_KERNEL_S = (2e-6, 2e-7, 5e-5)
"""Start, least and most of what an elementwise kernel takes besides its bytes."""
_SHARE = (0.8, 0.005, 1.0)
LAUNCHES = {"host": "host_s", "graph": "graph_s", "kernel": "kernel_s"}
"""Cases of `launches` that hold a field of a `LaunchCurve`: time of the host for one kernel and
for replaying one graph, and of an empty kernel on the device."""


class Plain(NamedTuple):
    """What was made of rows that move bytes."""

    curves: tuple[MemoryCurve, ...]
    kernel_s: float | None
    score: Score | None


def fit_memory(rows: Sequence[Row], bytes_per_s: float, source: str) -> Plain:
    """Fit the share of the bandwidth for each class, and one start-up time for all."""
    mine = [
        row
        for row in rows
        if row.case.family == "elementwise" and row.case.name in MEMORY_OPS and row.bytes
    ]
    if not mine:
        return Plain((), None, None)
    ops = [op for op in MEMORY_OPS if any(row.case.name == op for row in mine)]
    place = np.array([ops.index(row.case.name) for row in mine])  # type: ignore[arg-type]
    moved = np.array([row.bytes for row in mine], dtype=float)

    def seconds(values: Array) -> Array:
        return values[0] + moved / (values[1:][place] * bytes_per_s)

    free = [_KERNEL_S, *[_SHARE] * len(ops)]
    found, _ = fit_logs(seconds, [row.seconds for row in mine], free)
    curves = tuple(
        MemoryCurve(op=op, efficiency=round(float(share), 4), source=source)
        for op, share in zip(ops, found[1:], strict=True)
    )
    # Rows of one size each cannot tell a start-up time from a slower stream.
    sized = len({(row.case.name, row.bytes) for row in mine}) > len(ops)
    kernel_s = float(f"{found[0]:.4g}") if sized else None
    return Plain(curves, kernel_s, score(mine, seconds(found)))


def fit_launch(
    rows: Sequence[Row], kernel_s: float | None, default: LaunchCurve, source: str
) -> LaunchCurve | None:
    """Return launching as measured, the rest as it was; None where nothing was."""
    found = {
        field: median(times)
        for name, field in LAUNCHES.items()
        if (
            times := [
                row.seconds
                for row in rows
                if row.case.family == "launches" and row.case.name == name
            ]
        )
    }
    if kernel_s is not None:
        found["kernel_s"] = kernel_s
    if not found:
        return None
    known = {name: getattr(default, name) for name in LAUNCHES.values()}
    return LaunchCurve(**{**known, **found}, source=source)
