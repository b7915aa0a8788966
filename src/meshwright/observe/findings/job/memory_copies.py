"""Patterns of copies between memories."""

from collections.abc import Callable

import numpy as np

from meshwright.observe.analyze.spans.intervals import (
    MEMORY_COPY,
    Flags,
    measure_covered_ns,
    measure_total_ns,
    union,
)
from meshwright.observe.findings.job.evidence_format import (
    format_per_step,
    select_longest_device_spans,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import MIN_GPU_SHARE, Detection, Pattern
from meshwright.observe.findings.text_format import format_duration

ROUND_TRIP_NS = 5_000_000
MIN_MEMSETS = 100


def _copies(rank: RankContext, *words: str) -> Flags:
    found: Flags = rank.spans.kind == MEMORY_COPY
    for word in words:
        found &= rank.match_names(word)
    return found


def _rate(rank: RankContext, own: Flags) -> str:
    size = rank.rank_timeline.column("bytes")[rank.spans.row[own]]
    known = size >= 0
    time = rank.duration_ns[own][known].sum()
    return f", {size[known].sum() / time:.3g} GB/s" if time and known.any() else ""


def _hit(rank: RankContext, own: Flags, what: str, extra_ns: int = 0) -> Detection | None:
    if not own.any():
        return None
    cost = measure_total_ns(rank.find_exposed_intervals(own)) + extra_ns
    evidence = (
        f"{what}: {format_per_step(rank, own.sum())}, "
        f"{format_duration(rank.duration_ns[own].sum())} in all"
        f"{_rate(rank, own)}; {format_duration(cost)} not hidden behind compute",
    )
    return Detection(cost, evidence, select_longest_device_spans(rank, own))


@detects_on_rank(
    Pattern(
        name="pageable-copy",
        title="Input is copied from pageable memory",
        family="copies",
        rule="copies host to device from pageable memory that no compute hides, and the late "
        "gaps while the host is inside their calls",
        cost_basis="measured: both; pinned memory is faster and runs beside compute",
        remedy='DataLoader(pin_memory=True) and x.to("cuda", non_blocking=True)',
    )
)
def detect_pageable_copy(rank: RankContext) -> Detection | None:
    """Copies that block the host and cannot overlap."""
    own = _copies(rank, "HtoD", "Pageable")
    return _hit(rank, own, "copies from pageable memory", rank.late_ns_by_cause("copying"))


def _exposed(
    name: str,
    title: str,
    *,
    what: str,
    copies: Callable[[RankContext], Flags],
    detected: str,
    remedy: str,
    least_share: float = MIN_GPU_SHARE,
    serving: str = "",
    rocm: str = "",
) -> None:
    """A pattern of copies that no compute hides."""
    cost = "measured: their time in which nothing computes"

    @detects_on_rank(
        Pattern(name, title, "copies", detected, cost, remedy, least_share, serving, rocm)
    )
    def detector(rank: RankContext) -> Detection | None:
        return _hit(rank, copies(rank), what)


_exposed(
    "h2d-copy-not-overlapped",
    "Input is copied on the computing stream",
    what="copies on the computing stream",
    copies=lambda rank: (
        _copies(rank, "HtoD")
        & ~rank.match_names("Pageable")
        & (rank.spans.lane == rank.main_stream)
    ),
    detected="copies host to device, from memory that is not said to be pageable, on the stream "
    "that computes",
    remedy="prefetch the next batch on a side stream: with torch.cuda.stream(side): "
    'x.to("cuda", non_blocking=True), then torch.cuda.current_stream().wait_stream(side)',
    rocm="pin the batch (DataLoader(pin_memory=True)) and prefetch the next one on a side stream: "
    'with torch.cuda.stream(side): x.to("cuda", non_blocking=True)',
)
_exposed(
    "d2h-copy-exposed",
    "Results are copied to the host in line with compute",
    what="copies to the host",
    copies=lambda rank: _copies(rank, "DtoH"),
    detected="copies device to host that no compute hides",
    remedy='copy results with .to("cpu", non_blocking=True) into pinned memory on a side '
    "stream; copy less, and less often",
)
_exposed(
    "device-to-device-copies",
    "Tensors are copied within the device",
    what="copies within the device",
    copies=lambda rank: _copies(rank, "DtoD"),
    detected="copies device to device",
    remedy="drop .clone() and .contiguous(); write into preallocated views; for DDP "
    "gradient_as_bucket_view=True",
    least_share=0.02,
    serving="drop .clone() and .contiguous(); write into preallocated views",
)


@detects_on_rank(
    Pattern(
        name="host-round-trip",
        title="A tensor goes to the host and comes back",
        family="copies",
        rule="a copy to the host of 4 KiB or more and, within 5 ms, a copy of the same size "
        "back: an operator ran on the CPU",
        cost_basis="measured: from the first copy's start to the second's end, less the compute in "
        "it",
        remedy="run the operator on the device: no .cpu() or .numpy() in the step; where a kernel "
        "is missing, write it with torch.compile or Triton",
    )
)
def detect_host_round_trip(rank: RankContext) -> Detection | None:
    """Pairs of copies of one size."""
    size = rank.rank_timeline.column("bytes")[rank.spans.row]
    out = np.flatnonzero(_copies(rank, "DtoH") & (size >= 4096))
    back = np.flatnonzero(_copies(rank, "HtoD") & (size >= 4096))
    if not out.size or not back.size:
        return None
    place = np.searchsorted(rank.spans.start[back], rank.spans.end[out])
    pair = back[np.minimum(place, back.size - 1)]
    start, end = rank.spans.start[out], rank.spans.end[pair]
    near = (place < back.size) & (size[pair] == size[out]) & (end - start < ROUND_TRIP_NS)
    if not near.any():
        return None
    start, end = start[near], end[near]
    away = union(start, end)
    cost = int((away.end - away.start - measure_covered_ns(rank.compute_intervals, *away)).sum())
    evidence = (
        f"{format_per_step(rank, near.sum())} round trips of {int(size[out[near]].max())} bytes",
    )
    return Detection(cost, evidence, tuple(zip(start.tolist(), end.tolist(), strict=True))[:5])


@detects_on_rank(
    Pattern(
        name="many-memsets",
        title="Many tensors are set to zero",
        family="copies",
        rule="100 or more memsets and fills per step (or in zero_grad)",
        cost_basis="measured: their time, and gaps below 30 µs before them",
        remedy="optimizer.zero_grad(set_to_none=True); torch.empty instead of torch.zeros where "
        "every element is written",
        serving_remedy="torch.empty instead of torch.zeros where every element is written",
    )
)
def detect_many_memsets(rank: RankContext) -> Detection | None:
    """Memsets and fills."""
    own = (rank.spans.kind == MEMORY_COPY) & rank.match_names("Memset") | rank.match_kernels("fill")
    if own.sum() / (rank.num_steps or 1.0) < MIN_MEMSETS:
        return None
    spent, before = measure_total_ns(rank.find_busy_intervals(own)), rank.short_gaps_ns(own)
    in_zero_grad = int((own & rank.match_launched_in("zeroing", own)).sum())
    evidence = (
        f"{format_per_step(rank, own.sum())} fills, {in_zero_grad} of them in zero_grad",
        f"{format_duration(spent)} in them, {format_duration(before)} in gaps before them",
    )
    return Detection(spent + before, evidence, select_longest_device_spans(rank, own))
