"""Patterns of a host that does not keep the device fed."""

import numpy as np

from meshwright.observe.analyze.idle import KERNEL_GAP_NS
from meshwright.observe.analyze.spans import covered
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import longest, longest_of, per_step, share, short, took

TINY_NS = 10_000
"""A kernel below this takes about as long as launching it takes the host."""
MANY_TINY = 0.5
LONG_PAUSE_NS = 10_000_000
"""No step of a loop is held up that long by Python alone."""


@of_rank(
    Pattern(
        name="launch-bound",
        title="Launching holds up the device",
        family="launching",
        detected="pieces of 1 ms in which the device is idle for more than half, kernels are short "
        "(mean below 50 µs), and the host neither waits nor loads data",
        cost="measured: the late gaps in those pieces",
        remedy='capture the step in a CUDA graph: torch.compile(model, mode="reduce-overhead"), or '
        "torch.cuda.graph(...)",
        least_share=0.02,
    )
)
def launch_bound(rank: Rank) -> Hit | None:
    """Regions in which launches come too slowly."""
    cost = rank.claimed_ns("launching")
    if not cost:
        return None
    found = rank.launches
    regions = sorted(found.launch_bound, key=lambda one: -one.idle_ns)
    kernels = sum(one.num_kernels for one in regions)
    evidence = [
        f"{len(regions)} launch-bound regions with {kernels} kernels, device idle {took(cost)}",
        f"{found.num_shorter_than_call} of {found.num_launches} launches take the host longer than "
        "the device",
    ]
    candidate = max(found.graph_candidates, key=lambda one: len(one.step_numbers), default=None)
    if candidate is not None:
        first = f"; {candidate.num_synchronising} synchronising calls have to go first"
        evidence.append(
            f"{len(candidate.step_numbers)} steps launch the same {candidate.num_launches} "
            f"kernels in the same order: one graph{first if candidate.num_synchronising else ''}"
        )
    evidence += _slowed_by_profiler(rank)
    return Hit(cost, tuple(evidence), tuple((one.start_ns, one.end_ns) for one in regions[:5]))


@of_rank(
    Pattern(
        name="late-host",
        title="The host is late with work",
        family="launching",
        detected="late gaps that data, compilation, collection, checkpoints, the allocator, the "
        "profiler, copies, synchronisation and what follows from it, an unfused optimizer and "
        "launch-bound regions do not explain",
        cost="measured: those gaps",
        remedy="torch.compile(model); move Python work out of the loop; look at the host's spans "
        "in the gaps named here",
        least_share=0.03,
    )
)
def late_host(rank: Rank) -> Hit | None:
    """Python between launches."""
    left = rank.claims["rest"]
    cost = rank.claimed_ns("rest")
    if not cost:
        return None
    evidence = [f"{left.start.size} gaps, device idle {took(cost)} for launches that came late"]
    for start, end in longest_of(left)[:3]:
        ending = int(np.searchsorted(rank.spans.start, end, side="left"))
        name = short(rank.spans.names[rank.spans.name[ending]])
        evidence.append(f"{took(end - start)} before {name}{_meanwhile(rank, start, end)}")
    evidence += _slowed_by_profiler(rank)
    return Hit(cost, tuple(evidence), longest_of(left), _instead(rank))


def _instead(rank: Rank) -> str:
    """The remedy where one pause is most of it, the optimizer is late, or all is compiled."""
    left = rank.claims["rest"]
    length = left.end - left.start
    at = int(length.argmax())
    if 2 * length[at] > length.sum() and length[at] > LONG_PAUSE_NS:
        meanwhile = _meanwhile(rank, int(left.start[at]), int(left.end[at])).lstrip(": ")
        return (
            f"one pause of {took(length[at])} is most of it"
            + (f", in which {meanwhile}: look there" if meanwhile else "")
            + "; where it comes once, leave it out of the profile: schedule(wait=1, warmup=2, "
            "active=3)"
        )
    ending = np.searchsorted(rank.spans.start, left.end, side="left")
    updating = rank.launched_in("updating")[np.minimum(ending, rank.length.size - 1)]
    if length[updating].sum() > length.sum() / 2:
        return (
            "launch the optimizer with less Python: torch.compile(optimizer.step), or "
            "AdamW(params, fused=True, capturable=True) inside torch.cuda.graph(...)"
        )
    compiled = any(name.startswith("Torch-Compiled") for name in rank.part.strings("name").values)
    return (
        'the model is compiled already: torch.compile(model, mode="reduce-overhead") launches it '
        "as CUDA graphs; move Python work out of the loop"
        if compiled and (rank.trains or not rank.framework)
        else ""
    )


def _slowed_by_profiler(rank: Rank) -> list[str]:
    """A line where the profile holds Python stacks: recording them slows the host."""
    if not rank.category("python_function").size:
        return []
    return ["recorded with Python stacks, which slow the host: measure with with_stack=False"]


def _meanwhile(rank: Rank, start: int, end: int) -> str:
    """The operator or Python function that covers most of a gap, innermost."""
    rows = rank.category("python_function", "cpu_op", "user_annotation", "Operator")
    shared = np.minimum(rank.end[rows], end) - np.maximum(rank.start[rows], start)
    long = rows[shared > (end - start) * 0.6]
    if not long.size:
        return ""
    inner = long[np.argmin(rank.end[long] - rank.start[long])]
    names = rank.part.strings("name")
    name = names.values[names.codes[inner]]
    return "" if name.startswith("ProfilerStep") else f": the host is in {short(name)}"


@of_rank(
    Pattern(
        name="tiny-kernels",
        title="Many kernels too small for the device",
        family="launching",
        detected="more than half of the kernels take below 10 µs; gaps below 30 µs before such a "
        "kernel that was launched in time",
        cost="measured: those gaps (starting up and draining, which larger kernels would not have)",
        remedy="fuse them: torch.compile(model); batch small tensors with torch._foreach_*; "
        "larger micro-batches",
        serving="fuse them: torch.compile(model); larger batches",
    )
)
def tiny_kernels(rank: Rank) -> Hit | None:
    """Gaps that only the number of kernels makes."""
    tiny = rank.length < TINY_NS
    if not tiny.size or tiny.mean() < MANY_TINY or not rank.ending.size:
        return None
    length = rank.gaps.end - rank.gaps.start
    own = ~rank.late & (length < KERNEL_GAP_NS) & tiny[rank.ending]
    cost = int(length[own].sum())
    evidence = (
        f"{share(tiny.sum(), tiny.size)} of {tiny.size} kernels and copies take below 10 µs "
        f"({per_step(rank, tiny.sum())})",
        f"{int(own.sum())} gaps before them, {took(length[own].mean() if own.any() else 0)} each",
    )
    return Hit(cost, evidence, longest(rank.gaps.start[own], rank.gaps.end[own]))


@of_rank(
    Pattern(
        name="queued-work-waits",
        title="The device waits though work is queued",
        family="launching",
        detected="gaps of 30 µs and more whose next kernel was launched before the gap began: it "
        "waits for an event of another stream, a copy or a peer",
        cost="measured: those gaps",
        remedy="look at what the stream waits for (cudaStreamWaitEvent before the kernel named "
        "here): record the event earlier, or give the copy or collective it waits for a head start",
        least_share=0.02,
    )
)
def queued_work_waits(rank: Rank) -> Hit | None:
    """Long gaps before kernels that had been launched."""
    if not rank.ending.size:
        return None
    length = rank.gaps.end - rank.gaps.start
    # Without recorded launches nobody can tell why a gap is there.
    own = ~rank.late & (length >= KERNEL_GAP_NS) & (rank.launch[rank.ending] >= 0)
    if not own.any():
        return None
    at = int(np.flatnonzero(own)[np.argmax(length[own])])
    name = short(rank.spans.names[rank.spans.name[rank.ending[at]]])
    ahead = int(rank.gaps.start[at] - rank.start[rank.launch[rank.ending[at]]])
    evidence = (
        f"{int(own.sum())} gaps, {took(length[own].sum())} in all",
        f"the longest, {took(length[at])}, before {name}, launched {took(ahead)} before it began",
    )
    return Hit(int(length[own].sum()), evidence, longest(rank.gaps.start[own], rank.gaps.end[own]))


@of_rank(
    Pattern(
        name="profiler-overhead",
        title="The profiler itself holds up the host",
        family="launching",
        detected="late gaps while the profiler's own overhead spans (buffer flushes, "
        "instrumentation, lazy loading) run",
        cost="measured: those gaps; they are not there without the profiler",
        remedy="profile with with_stack=False, record_shapes=False, and skip first steps: "
        "schedule(wait=1, warmup=2, active=3)",
    )
)
def profiler_overhead(rank: Rank) -> Hit | None:
    """Idle while the profiler works."""
    rows = rank.category("overhead")
    cost = rank.claimed_ns("profiling")
    if not cost:
        return None
    lost = covered(rank.late_gaps, rank.start[rows], rank.end[rows])
    worst = rows[np.argsort(-lost, kind="stable")[:3]]
    names = rank.part.strings("name")
    evidence = (
        f"{rows.size} overhead spans, device idle {took(cost)} meanwhile",
        *(f"{names.values[names.codes[row]]}: {took(rank.end[row] - rank.start[row])}"
          for row in worst.tolist()),
    )  # fmt: skip
    return Hit(cost, evidence, longest_of(rank.claims["profiling"]))
