"""How much of the device's peak a step's products use: MFU from the trace.

Each product counts against the peak of its own element type, so a share of 1 would mean that the
device did nothing but products, each at its peak. What a trace does not name with shapes is not
counted: custom and compiled (Triton) kernels, attention outside PyTorch's own, everything that is
no product. Products that recomputation repeats are counted as often as they ran, so with
recomputation this is HFU rather than MFU.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.device import device_of, peak_flops
from meshwright.observe.analyze.kernels import attribute
from meshwright.observe.analyze.products import products
from meshwright.observe.analyze.spans import COMPUTE
from meshwright.observe.analyze.steps import Extent, counted, launch_starts, steps_of
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
    """Whole steps that were measured, from start to start; 0: the device's whole window."""
    time_ns: int
    """How long those took."""
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


def mfu(timeline: Timeline, extent: Extent = Extent.SETTLED) -> tuple[RankMfu, ...]:
    """How much of its device's peak every rank uses."""
    return tuple(mfu_of(part, extent) for part in timeline.by_rank())


def mfu_of(part: Timeline, extent: Extent = Extent.SETTLED, *, num_uncounted: int = 5) -> RankMfu:
    """How much of its device's peak one rank uses."""
    found, device = products(part), device_of(part)
    spans = counted(part, extent)
    marks = steps_of(part).steps
    if len(marks) > 1:
        low, high, number = marks[0].start_ns, marks[-1].start_ns, len(marks) - 1
        moment = launch_starts(part, spans)
    else:
        (low, high), number = spans.window_ns, 0
        moment = spans.start
    has = attribute(part, spans, found)
    inside = (moment >= low) & (moment < high)
    by_dtype: dict[str, float] = {}
    at_peak_s = 0.0
    for place in np.flatnonzero(inside & (has.product != ABSENT)).tolist():
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
        num_steps=number,
        time_ns=high - low,
        flops=sum(by_dtype.values()),
        by_dtype=by_dtype,
        mfu=at_peak_s * 1e9 / (high - low) if at_peak_s and high > low else None,
        counted_share=known_ns / compute_ns if compute_ns else 0.0,
        uncounted=tuple(
            Uncounted(spans.names[name], int(totals[name]))
            for name in longest.tolist()
            if totals[name]
        ),
    )
