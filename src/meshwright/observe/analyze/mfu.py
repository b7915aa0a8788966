"""How much of the device's peak a step's products use: MFU from the trace.

Each product counts against the peak of its own element type, so a share of 1 would mean that the
device did nothing but products, each at its peak. What a trace does not name with shapes is not
counted: custom and compiled (Triton) kernels, attention outside PyTorch and FlashAttention,
everything that is no product. Products that recomputation repeats are counted as often as they
ran, so with recomputation this is HFU rather than MFU.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.device import device_of, peak_flops
from meshwright.observe.analyze.kernels import attribute
from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.products import products
from meshwright.observe.analyze.spans import COMPUTE, distinct
from meshwright.observe.analyze.steps import (
    Extent,
    counted,
    counted_steps,
    counted_window,
    steps_of,
)
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline


class Uncounted(NamedTuple):
    """A compute kernel whose FLOPs are not known."""

    name: str
    total_ns: int


class RankMfu(NamedTuple):
    """What one rank's products make of its device."""

    rank: int
    device: str
    """The catalog's name; empty where it is not known, and then there is no share."""
    num_steps: int
    """Steps that were counted; 0 where the trace does not tell them."""
    time_ns: int
    """How long those took, from the device's start of the first to its start of the next one.

    Where none follows, to the end of their work, and as long as the host was in them at least."""
    flops: float
    """Of all counted products in them."""
    by_dtype: dict[str, float]
    """FLOPs by element type."""
    mfu: float | None
    """Time that the products would take at peak, over the time taken; None without a peak."""
    counted_share: float
    """Of compute time, the part in kernels whose FLOPs are counted."""
    uncounted: tuple[Uncounted, ...]
    """The longest compute kernels that are not counted."""
    assumed: tuple[str, ...] = ()
    """What was taken for granted of products, where the trace does not say it."""


def mfu(timeline: Timeline, extent: Extent = Extent.SETTLED) -> tuple[RankMfu, ...]:
    """How much of its device's peak every rank uses."""
    return tuple(mfu_of(part, extent) for part in per_device(timeline))


def mfu_of(part: Timeline, extent: Extent = Extent.SETTLED, *, num_uncounted: int = 5) -> RankMfu:
    """How much of its device's peak one rank uses."""
    found, device = products(part), device_of(part)
    spans = counted(part, extent)
    time_ns = _time_ns(part, extent)
    has = attribute(part, spans, found)
    by_dtype: dict[str, float] = {}
    at_peak_s = 0.0
    for place in np.flatnonzero(has.product != ABSENT).tolist():
        dtype, flops = found.dtype[has.product[place]], float(has.flops[place])
        by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flops
        peak = peak_flops(device, dtype, spans.names[spans.name[place]]) if device else None
        at_peak_s += flops / peak if peak else 0.0
    length = spans.end - spans.start
    compute = spans.kind == COMPUTE
    known_ns = int(length[compute & (has.product != ABSENT)].sum())
    compute_ns = int(length[compute].sum())
    rest = compute & (has.product == ABSENT)
    totals = np.bincount(spans.name[rest], weights=length[rest]) if rest.any() else np.zeros(0)
    longest = np.argsort(-totals, kind="stable")[:num_uncounted]
    return RankMfu(
        rank=part.ranks[0] if part.ranks else 0,
        device=device.name if device else "",
        num_steps=counted_steps(part, extent),
        time_ns=time_ns,
        flops=sum(by_dtype.values()),
        by_dtype=by_dtype,
        mfu=at_peak_s * 1e9 / time_ns if at_peak_s and time_ns else None,
        counted_share=known_ns / compute_ns if compute_ns else 0.0,
        uncounted=tuple(
            Uncounted(spans.names[name], int(totals[name]))
            for name in longest.tolist()
            if totals[name]
        ),
        assumed=tuple(
            sorted({found.assumed[at] for at in distinct(has.product).tolist() if at >= 0} - {""})
        ),
    )


def _time_ns(part: Timeline, extent: Extent) -> int:
    """How long the counted steps took the device, with the pause before the step that follows."""
    low, high = counted(part, extent).window_ns
    window = counted_window(part, extent)
    if window is None or counted_steps(part, extent) == 0:
        return high - low
    later = [step.device_start_ns for step in steps_of(part).steps if step.start_ns >= window[1]]
    if later and later[0] != ABSENT:
        return max(high, later[0]) - low
    # Nothing follows on the device: the host's time of those steps is the least that they took.
    return max(high - low, window[1] - window[0])
