"""HTA's idle time per stream: host wait, kernel wait, other."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.hta.hta_frame import HtaFrame, sort_as_hta

KERNEL_WAIT_US = 30
"""A shorter gap between kernels counts as kernel wait (HTA's `consecutive_kernel_delay`)."""
_CATEGORIES = frozenset(
    {"kernel", "Kernel", "gpu_memset", "Memset", "gpu_memcpy", "Memcpy", "mtia_ccp_events"}
)


class HtaStreamIdle(NamedTuple):
    """A row of HTA's `get_idle_time_breakdown`."""

    rank: int
    stream: int
    idle_category: str
    idle_us: int
    """Sum of the gaps; a gap between kernels that overlap is negative."""
    ratio: float | None
    """Of the stream's gaps together, two digits; None where they sum to nothing."""


def get_idle_breakdown(frame: HtaFrame) -> tuple[HtaStreamIdle, ...]:
    """The gaps of every stream of one rank by cause; streams in the order they appear."""
    filed = np.array([name in _CATEGORIES for name in frame.categories] + [False])
    kernels = frame.take((frame.stream != -1) & filed[frame.category])
    _, first = np.unique(kernels.stream, return_index=True)
    found: list[HtaStreamIdle] = []
    for stream in kernels.stream[np.sort(first)].tolist():
        found += _stream(kernels.take(kernels.stream == stream), stream)
    return tuple(found)


def _stream(kernels: HtaFrame, stream: int) -> list[HtaStreamIdle]:
    kernels = kernels.take(sort_as_hta(kernels.ts))
    previous = (kernels.ts + kernels.duration)[:-1]
    gap = kernels.ts[1:] - previous
    launched = kernels.launch_ts[1:]
    host = (launched >= 0) & (launched > previous)
    near = ~host & (gap < KERNEL_WAIT_US)
    other = ~host & ~near
    # The first kernel of a stream has no gap; it makes HTA list `other` in any case.
    sums = [("host_wait", host, host.any()), ("kernel_wait", near, near.any())]
    sums.append(("other", other, True))
    total = int(gap.sum())
    return [
        HtaStreamIdle(
            kernels.rank,
            stream,
            category,
            us := int(gap[which].sum()),
            round(us / total, 2) if total else None,
        )
        for category, which, listed in sums
        if listed
    ]
