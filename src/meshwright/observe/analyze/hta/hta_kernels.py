"""HTA's kernel breakdown: time by name, with what is small put together as `others`."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.hta.hta_frame import COMMUNICATION, COMPUTATION, MEMORY, HtaFrame
from meshwright.observe.analyze.spans.intervals import Ints

NUM_KERNELS = 10
"""How many names are shown of each sort (HTA's `num_kernels`)."""
DURATION_RATIO = 0.8
"""Names past this quantile of the running total join `others` (HTA's `duration_ratio`)."""


class HtaKernelTime(NamedTuple):
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


def get_kernel_breakdown(frame: HtaFrame) -> tuple[HtaKernelTime, ...]:
    """Time by name and sort of kernel of one rank, sorted by both."""
    device = frame.mask_device()
    found: list[HtaKernelTime] = []
    for sort in (COMPUTATION, COMMUNICATION, MEMORY):
        found += _of_type(device.match_kernel_type(sort), sort)
    return tuple(sorted(found, key=lambda row: (row.kernel_type, row.name)))


def _of_type(kernels: HtaFrame, sort: str) -> list[HtaKernelTime]:
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


def _row(name: str, durations: Ints, sort: str, rank: int) -> HtaKernelTime:
    std = float(durations.std(ddof=1)) if durations.size > 1 else 0.0
    return HtaKernelTime(
        name,
        int(durations.sum()),
        int(durations.max()),
        int(durations.min()),
        std,
        float(durations.mean()),
        sort,
        rank,
    )
