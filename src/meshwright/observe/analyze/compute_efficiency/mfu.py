"""How much of the device's peak a step's products use: MFU from the trace.

Each product counts against the peak of its own element type, so a share of 1 would mean that the
device did nothing but products, each at its peak. What a trace does not name with shapes is not
counted: custom and compiled (Triton) kernels, attention outside PyTorch and FlashAttention,
everything that is no product. Products that recomputation repeats are counted as often as they
ran, so with recomputation this is HFU rather than MFU.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.compute_efficiency.kernel_table import attribute_flops
from meshwright.observe.analyze.compute_efficiency.operator_flops import find_operator_flops
from meshwright.observe.analyze.compute_efficiency.trace_device import (
    find_peak_flops,
    find_trace_device,
)
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    count_complete_steps,
    find_counted_window,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import COMPUTE, sort_unique
from meshwright.observe.analyze.spans.steps import find_rank_steps
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline


class UncountedKernel(NamedTuple):
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
    flops_by_dtype: dict[str, float]
    """FLOPs by element type."""
    mfu: float | None
    """Time that the products would take at peak, over the time taken; None without a peak."""
    counted_share: float
    """Of compute time, the part in kernels whose FLOPs are counted."""
    uncounted_kernels: tuple[UncountedKernel, ...]
    """The longest compute kernels that are not counted."""
    assumptions: tuple[str, ...] = ()
    """What was taken for granted of products, where the trace does not say it."""


def analyze_mfu(
    timeline: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> tuple[RankMfu, ...]:
    """How much of its device's peak every rank uses."""
    return tuple(analyze_rank_mfu(part, extent) for part in split_by_device(timeline))


def analyze_rank_mfu(
    part: Timeline,
    extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS,
    *,
    num_uncounted: int = 5,
) -> RankMfu:
    """How much of its device's peak one rank uses."""
    found, device = find_operator_flops(part), find_trace_device(part)
    spans = select_counted_spans(part, extent)
    time_ns = _time_ns(part, extent)
    has = attribute_flops(part, spans, found)
    by_dtype: dict[str, float] = {}
    at_peak_s = 0.0
    for place in np.flatnonzero(has.operator_index != ABSENT).tolist():
        dtype, flops = found.dtype[has.operator_index[place]], float(has.flops[place])
        by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flops
        peak = find_peak_flops(device, dtype, spans.names[spans.name[place]]) if device else None
        at_peak_s += flops / peak if peak else 0.0
    length = spans.end - spans.start
    compute = spans.kind == COMPUTE
    known_ns = int(length[compute & (has.operator_index != ABSENT)].sum())
    compute_ns = int(length[compute].sum())
    rest = compute & (has.operator_index == ABSENT)
    totals = np.bincount(spans.name[rest], weights=length[rest]) if rest.any() else np.zeros(0)
    longest = np.argsort(-totals, kind="stable")[:num_uncounted]
    return RankMfu(
        rank=part.ranks[0] if part.ranks else 0,
        device=device.name if device else "",
        num_steps=count_complete_steps(part, extent),
        time_ns=time_ns,
        flops=sum(by_dtype.values()),
        flops_by_dtype=by_dtype,
        mfu=at_peak_s * 1e9 / time_ns if at_peak_s and time_ns else None,
        counted_share=known_ns / compute_ns if compute_ns else 0.0,
        uncounted_kernels=tuple(
            UncountedKernel(spans.names[name], int(totals[name]))
            for name in longest.tolist()
            if totals[name]
        ),
        assumptions=tuple(
            sorted(
                {
                    found.assumptions[at]
                    for at in sort_unique(has.operator_index).tolist()
                    if at >= 0
                }
                - {""}
            )
        ),
    )


def _time_ns(part: Timeline, extent: AnalysisExtent) -> int:
    """How long the counted steps took the device, with the pause before the step that follows."""
    low, high = select_counted_spans(part, extent).window_ns
    window = find_counted_window(part, extent)
    if window is None or count_complete_steps(part, extent) == 0:
        return high - low
    later = [
        step.device_start_ns for step in find_rank_steps(part).steps if step.start_ns >= window[1]
    ]
    if later and later[0] != ABSENT:
        return max(high, later[0]) - low
    # Nothing follows on the device: the host's time of those steps is the least that they took.
    return max(high - low, window[1] - window[0])
