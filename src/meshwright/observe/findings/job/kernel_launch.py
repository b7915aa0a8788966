"""Patterns of a host that does not keep the device fed."""

import numpy as np

from meshwright.observe.analyze.device_time.idle_time import MAX_KERNEL_GAP_NS
from meshwright.observe.analyze.spans.intervals import measure_covered_ns
from meshwright.observe.findings.job.evidence_format import (
    format_per_step,
    select_longest_intervals,
    select_longest_spans,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration, format_share, truncate_name

TINY_NS = 10_000
"""A kernel below this takes about as long as launching it takes the host."""
MIN_TINY_KERNELS = 0.5
LONG_PAUSE_NS = 10_000_000
"""No step of a loop is held up that long by Python alone."""


@detects_on_rank(
    Pattern(
        name="launch-bound",
        title="Device idle: kernel launches are too slow",
        family="launch",
        rule="pieces of 1 ms in which the device is idle for more than half, kernels are short "
        "(mean below 50 µs), and the host neither waits nor loads data",
        cost_basis="measured: the late gaps in those pieces",
        remedy='capture the step in a CUDA graph: torch.compile(model, mode="reduce-overhead"), or '
        "torch.cuda.graph(...)",
        min_cost=0.02,
    )
)
def detect_launch_bound(rank: RankContext) -> Detection | None:
    """Regions in which launches come too slowly."""
    cost = rank.late_ns_by_cause("launching")
    if not cost:
        return None
    found = rank.launches
    regions = sorted(found.launch_bound_regions, key=lambda one: -one.idle_ns)
    kernels = sum(one.num_kernels for one in regions)
    evidence = [
        f"{len(regions)} launch-bound regions with {kernels} kernels, device idle "
        f"{format_duration(cost)}",
        f"{found.num_kernels_shorter_than_call} of {found.num_launches} launches take the host "
        f"longer than "
        "the device",
    ]
    candidate = max(found.graph_candidates, key=lambda one: len(one.step_numbers), default=None)
    if candidate is not None:
        first = f"; {candidate.num_synchronizing_calls} synchronizing calls have to go first"
        evidence.append(
            f"{len(candidate.step_numbers)} steps launch the same {candidate.num_launches} "
            f"kernels in the same order: one "
            f"graph{first if candidate.num_synchronizing_calls else ''}"
        )
    evidence += _slowed_by_profiler(rank)
    return Detection(
        cost, tuple(evidence), tuple((one.start_ns, one.end_ns) for one in regions[:5])
    )


@detects_on_rank(
    Pattern(
        name="host-bound",
        title="Device idle: host-bound",
        family="launch",
        rule="late gaps that data, compilation, collection, checkpoints, the allocator, the "
        "profiler, copies, synchronization and what follows from it, an unfused optimizer and "
        "launch-bound regions do not explain",
        cost_basis="measured: those gaps",
        remedy="torch.compile(model); move Python work out of the loop; look at the host's spans "
        "in the gaps named here",
        min_cost=0.03,
    )
)
def detect_host_bound(rank: RankContext) -> Detection | None:
    """Python between launches."""
    left = rank.late_gaps_by_cause["rest"]
    cost = rank.late_ns_by_cause("rest")
    if not cost:
        return None
    evidence = [
        f"{left.start.size} gaps, device idle {format_duration(cost)} for launches that came late"
    ]
    for start, end in select_longest_intervals(left)[:3]:
        ending = int(np.searchsorted(rank.spans.start, end, side="left"))
        name = truncate_name(rank.spans.names[rank.spans.name[ending]])
        evidence.append(
            f"{format_duration(end - start)} before {name}{_meanwhile(rank, start, end)}"
        )
    evidence += _slowed_by_profiler(rank)
    return Detection(cost, tuple(evidence), select_longest_intervals(left), _instead(rank))


def _instead(rank: RankContext) -> str:
    """The remedy where one pause is most of it, the optimizer is late, or all is compiled."""
    left = rank.late_gaps_by_cause["rest"]
    length = left.end - left.start
    at = int(length.argmax())
    if 2 * length[at] > length.sum() and length[at] > LONG_PAUSE_NS:
        meanwhile = _meanwhile(rank, int(left.start[at]), int(left.end[at])).lstrip(": ")
        return (
            f"one pause of {format_duration(length[at])} is most of it"
            + (f", in which {meanwhile}: look there" if meanwhile else "")
            + "; where it comes once, leave it out of the profile: schedule(wait=1, warmup=2, "
            "active=3)"
        )
    ending = np.searchsorted(rank.spans.start, left.end, side="left")
    updating = rank.match_launched_in("updating")[np.minimum(ending, rank.duration_ns.size - 1)]
    if length[updating].sum() > length.sum() / 2:
        return (
            "launch the optimizer with less Python: torch.compile(optimizer.step), or "
            "AdamW(params, fused=True, capturable=True) inside torch.cuda.graph(...)"
        )
    compiled = any(
        name.startswith("Torch-Compiled")
        for name in rank.rank_timeline.string_column("name").values
    )
    return (
        'the model is compiled already: torch.compile(model, mode="reduce-overhead") launches it '
        "as CUDA graphs; move Python work out of the loop"
        if compiled and (rank.is_training or not rank.framework)
        else ""
    )


def _slowed_by_profiler(rank: RankContext) -> list[str]:
    """A line where the profile holds Python stacks: recording them slows the host."""
    if not rank.match_categories("python_function").size:
        return []
    return ["recorded with Python stacks, which slow the host: measure with with_stack=False"]


def _meanwhile(rank: RankContext, start: int, end: int) -> str:
    """The operator or Python function that covers most of a gap, innermost."""
    rows = rank.match_categories("python_function", "cpu_op", "user_annotation", "Operator")
    shared = np.minimum(rank.end[rows], end) - np.maximum(rank.start[rows], start)
    long = rows[shared > (end - start) * 0.6]
    if not long.size:
        return ""
    inner = long[np.argmin(rank.end[long] - rank.start[long])]
    names = rank.rank_timeline.string_column("name")
    name = names.values[names.codes[inner]]
    return "" if name.startswith("ProfilerStep") else f": the host is in {truncate_name(name)}"


@detects_on_rank(
    Pattern(
        name="tiny-kernels",
        title="Many kernels too small for the device",
        family="launch",
        rule="more than half of the kernels take below 10 µs; gaps below 30 µs before such a "
        "kernel that was launched in time",
        cost_basis="measured: those gaps (starting up and draining, which larger kernels would not "
        "have)",
        remedy="fuse them: torch.compile(model); batch small tensors with torch._foreach_*; "
        "larger micro-batches",
        serving_remedy="fuse them: torch.compile(model); larger batches",
    )
)
def detect_tiny_kernels(rank: RankContext) -> Detection | None:
    """Gaps that only the number of kernels makes."""
    tiny = rank.duration_ns < TINY_NS
    if not tiny.size or tiny.mean() < MIN_TINY_KERNELS or not rank.gap_end_span.size:
        return None
    length = rank.gaps.end - rank.gaps.start
    own = ~rank.is_late_gap & (length < MAX_KERNEL_GAP_NS) & tiny[rank.gap_end_span]
    cost = int(length[own].sum())
    evidence = (
        f"{format_share(tiny.sum(), tiny.size)} of {tiny.size} kernels and copies take below 10 µs "
        f"({format_per_step(rank, tiny.sum())})",
        f"{int(own.sum())} gaps before them, "
        f"{format_duration(length[own].mean() if own.any() else 0)} each",
    )
    return Detection(cost, evidence, select_longest_spans(rank.gaps.start[own], rank.gaps.end[own]))


@detects_on_rank(
    Pattern(
        name="queued-kernel-delay",
        title="The device waits though work is queued",
        family="launch",
        rule="gaps of 30 µs and more whose next kernel was launched before the gap began: it "
        "waits for an event of another stream, a copy or a peer",
        cost_basis="measured: those gaps",
        remedy="look at what the stream waits for (cudaStreamWaitEvent before the kernel named "
        "here): record the event earlier, or give the copy or collective it waits for a head start",
        min_cost=0.02,
    )
)
def detect_queued_kernel_delay(rank: RankContext) -> Detection | None:
    """Long gaps before kernels that had been launched."""
    if not rank.gap_end_span.size:
        return None
    length = rank.gaps.end - rank.gaps.start
    # Without recorded launches nobody can tell why a gap is there.
    own = (
        ~rank.is_late_gap
        & (length >= MAX_KERNEL_GAP_NS)
        & (rank.launch_row[rank.gap_end_span] >= 0)
    )
    if not own.any():
        return None
    at = int(np.flatnonzero(own)[np.argmax(length[own])])
    name = truncate_name(rank.spans.names[rank.spans.name[rank.gap_end_span[at]]])
    ahead = int(rank.gaps.start[at] - rank.start[rank.launch_row[rank.gap_end_span[at]]])
    evidence = (
        f"{int(own.sum())} gaps, {format_duration(length[own].sum())} in all",
        f"the longest, {format_duration(length[at])}, before {name}, launched "
        f"{format_duration(ahead)} before it began",
    )
    return Detection(
        int(length[own].sum()),
        evidence,
        select_longest_spans(rank.gaps.start[own], rank.gaps.end[own]),
    )


@detects_on_rank(
    Pattern(
        name="profiler-overhead",
        title="The profiler itself holds up the host",
        family="launch",
        rule="late gaps while the profiler's own overhead spans (buffer flushes, "
        "instrumentation, lazy loading) run",
        cost_basis="measured: those gaps; they are not there without the profiler",
        remedy="profile with with_stack=False, record_shapes=False, and skip first steps: "
        "schedule(wait=1, warmup=2, active=3)",
    )
)
def detect_profiler_overhead(rank: RankContext) -> Detection | None:
    """Idle while the profiler works."""
    rows = rank.match_categories("overhead")
    cost = rank.late_ns_by_cause("profiling")
    if not cost:
        return None
    lost = measure_covered_ns(rank.late_gaps, rank.start[rows], rank.end[rows])
    worst = rows[np.argsort(-lost, kind="stable")[:3]]
    names = rank.rank_timeline.string_column("name")
    evidence = (
        f"{rows.size} overhead spans, device idle {format_duration(cost)} meanwhile",
        *(f"{names.values[names.codes[row]]}: {format_duration(rank.end[row] - rank.start[row])}"
          for row in worst.tolist()),
    )  # fmt: skip
    return Detection(cost, evidence, select_longest_intervals(rank.late_gaps_by_cause["profiling"]))
