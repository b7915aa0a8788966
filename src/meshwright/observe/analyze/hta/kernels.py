"""HTA's kernel breakdown: time by name, with what is small put together as `others`."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.hta.frame import COMMUNICATION, COMPUTATION, MEMORY, Frame
from meshwright.observe.analyze.spans import Ints

NUM_KERNELS = 10
"""How many names are shown of each sort (HTA's `num_kernels`)."""
DURATION_RATIO = 0.8
"""Names past this quantile of the running total join `others` (HTA's `duration_ratio`)."""


class KernelTime(NamedTuple):
    """A row of HTA's kernel breakdown.

    Where names were put together, HTA takes its statistics over the names' sums, not over the
    kernels: sum, max, min and mean of a single name are then all the same.
    """

    name: str
    sum_us: int
    max_us: int
    min_us: int
    std: float
    mean_us: float
    kernel_type: str
    rank: int


def kernel_breakdown(frame: Frame) -> tuple[KernelTime, ...]:
    """Time by name and sort of kernel of one rank, sorted by both."""
    device = frame.on_device()
    found: list[KernelTime] = []
    for sort in (COMPUTATION, COMMUNICATION, MEMORY):
        found += _of_type(device.of_type(sort), sort)
    return tuple(sorted(found, key=lambda row: (row.kernel_type, row.name)))


def _of_type(kernels: Frame, sort: str) -> list[KernelTime]:
    codes, place = np.unique(kernels.name, return_inverse=True)
    names = [kernels.names[code] for code in codes.tolist()]
    by_name = sorted(range(len(names)), key=names.__getitem__)
    sums = np.bincount(place, weights=kernels.duration, minlength=len(names)).astype(np.int64)
    longest = sorted(by_name, key=lambda at: -int(sums[at]))
    if len(names) <= NUM_KERNELS:
        return [
            _row(names[at], kernels.duration[place == at], sort, kernels.rank) for at in by_name
        ]
    ordered = sums[longest]
    total = np.cumsum(ordered)
    joins = (total > np.quantile(total, DURATION_RATIO)) | (np.arange(total.size) >= NUM_KERNELS)
    rows = [
        _row(names[at], ordered[place : place + 1], sort, kernels.rank)
        for place, at in enumerate(longest)
        if not joins[place]
    ]
    return [*rows, _row("others", ordered[joins], sort, kernels.rank)]


def _row(name: str, durations: Ints, sort: str, rank: int) -> KernelTime:
    std = float(durations.std(ddof=1)) if durations.size > 1 else 0.0
    return KernelTime(
        name,
        int(durations.sum()),
        int(durations.max()),
        int(durations.min()),
        std,
        float(durations.mean()),
        sort,
        rank,
    )
