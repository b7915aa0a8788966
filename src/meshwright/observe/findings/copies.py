"""Patterns of copies between memories."""

from collections.abc import Callable

import numpy as np

from meshwright.observe.analyze.spans import MEMORY_COPY, Flags, covered, measure, union
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import LEAST_SHARE, Hit, Pattern, of_rank
from meshwright.observe.findings.say import per_step, places, took

ROUND_TRIP_NS = 5_000_000
MANY_FILLS = 100


def _copies(rank: Rank, *words: str) -> Flags:
    found: Flags = rank.spans.kind == MEMORY_COPY
    for word in words:
        found &= rank.named(word)
    return found


def _rate(rank: Rank, own: Flags) -> str:
    size = rank.part.column("bytes")[rank.spans.row[own]]
    known = size >= 0
    time = rank.length[own][known].sum()
    return f", {size[known].sum() / time:.3g} GB/s" if time and known.any() else ""


def _hit(rank: Rank, own: Flags, what: str, extra_ns: int = 0) -> Hit | None:
    if not own.any():
        return None
    cost = measure(rank.exposed(own)) + extra_ns
    evidence = (
        f"{what}: {per_step(rank, own.sum())}, {took(rank.length[own].sum())} in all"
        f"{_rate(rank, own)}; {took(cost)} not hidden behind compute",
    )
    return Hit(cost, evidence, places(rank, own))


@of_rank(
    Pattern(
        name="pageable-copy",
        title="Input is copied from pageable memory",
        family="copies",
        detected="copies host to device from pageable memory that no compute hides, and the late "
        "gaps while the host is inside their calls",
        cost="measured: both; pinned memory is faster and runs beside compute",
        remedy='DataLoader(pin_memory=True) and x.to("cuda", non_blocking=True)',
    )
)
def pageable_copy(rank: Rank) -> Hit | None:
    """Copies that block the host and cannot overlap."""
    own = _copies(rank, "HtoD", "Pageable")
    return _hit(rank, own, "copies from pageable memory", rank.claimed_ns("copying"))


def _exposed(
    name: str,
    title: str,
    *,
    what: str,
    copies: Callable[[Rank], Flags],
    detected: str,
    remedy: str,
    least_share: float = LEAST_SHARE,
    serving: str = "",
    rocm: str = "",
) -> None:
    """A pattern of copies that no compute hides."""
    cost = "measured: their time in which nothing computes"

    @of_rank(Pattern(name, title, "copies", detected, cost, remedy, least_share, serving, rocm))
    def detector(rank: Rank) -> Hit | None:
        return _hit(rank, copies(rank), what)


_exposed(
    "input-copy-not-overlapped",
    "Input is copied on the computing stream",
    what="copies on the computing stream",
    copies=lambda rank: (
        _copies(rank, "HtoD") & ~rank.named("Pageable") & (rank.spans.lane == rank.main_lane)
    ),
    detected="copies host to device, from memory that is not said to be pageable, on the stream "
    "that computes",
    remedy="prefetch the next batch on a side stream: with torch.cuda.stream(side): "
    'x.to("cuda", non_blocking=True), then torch.cuda.current_stream().wait_stream(side)',
    rocm="pin the batch (DataLoader(pin_memory=True)) and prefetch the next one on a side stream: "
    'with torch.cuda.stream(side): x.to("cuda", non_blocking=True)',
)
_exposed(
    "output-copy-exposed",
    "Results are copied to the host in line with compute",
    what="copies to the host",
    copies=lambda rank: _copies(rank, "DtoH"),
    detected="copies device to host that no compute hides",
    remedy='copy results with .to("cpu", non_blocking=True) into pinned memory on a side '
    "stream; copy less, and less often",
)
_exposed(
    "tensor-copies",
    "Tensors are copied within the device",
    what="copies within the device",
    copies=lambda rank: _copies(rank, "DtoD"),
    detected="copies device to device",
    remedy="drop .clone() and .contiguous(); write into preallocated views; for DDP "
    "gradient_as_bucket_view=True",
    least_share=0.02,
    serving="drop .clone() and .contiguous(); write into preallocated views",
)


@of_rank(
    Pattern(
        name="host-round-trip",
        title="A tensor goes to the host and comes back",
        family="copies",
        detected="a copy to the host of 4 KiB or more and, within 5 ms, a copy of the same size "
        "back: an operator ran on the CPU",
        cost="measured: from the first copy's start to the second's end, less the compute in it",
        remedy="run the operator on the device: no .cpu() or .numpy() in the step; where a kernel "
        "is missing, write it with torch.compile or Triton",
    )
)
def host_round_trip(rank: Rank) -> Hit | None:
    """Pairs of copies of one size."""
    size = rank.part.column("bytes")[rank.spans.row]
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
    cost = int((away.end - away.start - covered(rank.compute, *away)).sum())
    evidence = (f"{per_step(rank, near.sum())} round trips of {int(size[out[near]].max())} bytes",)
    return Hit(cost, evidence, tuple(zip(start.tolist(), end.tolist(), strict=True))[:5])


@of_rank(
    Pattern(
        name="fill-storm",
        title="Many tensors are set to zero",
        family="copies",
        detected="100 or more memsets and fills per step (or in zero_grad)",
        cost="measured: their time, and gaps below 30 µs before them",
        remedy="optimizer.zero_grad(set_to_none=True); torch.empty instead of torch.zeros where "
        "every element is written",
        serving="torch.empty instead of torch.zeros where every element is written",
    )
)
def fill_storm(rank: Rank) -> Hit | None:
    """Memsets and fills."""
    own = (rank.spans.kind == MEMORY_COPY) & rank.named("Memset") | rank.kernels("fill")
    if own.sum() / (rank.num_steps or 1.0) < MANY_FILLS:
        return None
    spent, before = measure(rank.when(own)), rank.short_gaps_ns(own)
    in_zero_grad = int((own & rank.launched_in("zeroing", own)).sum())
    evidence = (
        f"{per_step(rank, own.sum())} fills, {in_zero_grad} of them in zero_grad",
        f"{took(spent)} in them, {took(before)} in gaps before them",
    )
    return Hit(spent + before, evidence, places(rank, own))
