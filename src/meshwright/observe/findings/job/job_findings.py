"""Looks for every pattern, puts what ranks show alike together, ranks it by cost and cause.

find_inefficiencies(timelines)   all of it: one timeline per rank, each read once
detect_on_rank(rank)             what one rank shows; may run in another process
merge_ranks(examined)            the ranks' answers together, with what only all show
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.row_selection import select_comparison_rows
from meshwright.observe.finding import Finding
from meshwright.observe.findings.job.job_context import (
    JobContext,
    RankTotals,
    sum_rank_totals,
)
from meshwright.observe.findings.job.job_registry import CROSS_RANK_PATTERNS, RANK_PATTERNS
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import MAX_SPANS, Detection, Pattern
from meshwright.timeline.timeline import Timeline

MIN_SPANS_FOR_ADVICE = 20
"""With fewer device spans a trace shows calls by hand and no loop whose settings could be told."""

_OF_LOOPS = ("launch", "gemm", "fusion", "communication")

_HOST = (
    "data-loader-stall", "recompilation", "warmup-in-profile", "garbage-collection",
    "checkpoint-stall", "allocator-churn",
)  # fmt: skip

_STRAGGLERS = (
    "straggler-slow-kernels", "straggler-more-work", "straggler-host-bound", "straggler-data-wait",
    "rotating-stragglers", "slow-link",
)  # fmt: skip

_WAYS = ("communication-on-compute-stream", "small-collectives", "barrier-in-loop")

CONSEQUENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("exposed-", (*_STRAGGLERS, *_WAYS, "pipeline-bubble", "low-bus-bandwidth")),
    ("step-outliers", _HOST),
    ("step-time-change", ("kernels-slow-down", *_HOST)),
    ("tiny-kernels", ("unfused-optimizer", "many-memsets")),
    ("d2h-copy-exposed", ("host-round-trip",)),
    ("h2d-copy-not-overlapped", ("host-round-trip",)),
)
"""How a pattern's name begins, and the patterns it may be a consequence of; no cause is one."""


class RankDetections(NamedTuple):
    """What one rank shows, and what is kept to compare it with others."""

    totals: RankTotals
    detections: tuple[tuple[str, Detection], ...]
    comparison_rows: Timeline


def find_inefficiencies(timelines: Iterable[Timeline]) -> tuple[Finding, ...]:
    """Every inefficiency of a run, costliest first; what costs no time comes last."""
    return merge_ranks(
        detect_on_rank(RankContext(part))
        for timeline in timelines
        for part in split_by_device(timeline)
    )


def detect_on_rank(rank: RankContext, kept: Timeline | None = None) -> RankDetections:
    """Look for what one rank shows; `kept` are the rows to compare it by, where they are known."""
    hits = []
    if rank.window_ns:
        for pattern, detector in RANK_PATTERNS.values():
            hit = detector(rank)
            if hit is not None and _matters(pattern, hit, rank.window_ns):
                hits.append((pattern.name, _within(hit, rank.window_ns)))
    return RankDetections(
        sum_rank_totals(rank),
        tuple(hits),
        select_comparison_rows(rank.rank_timeline) if kept is None else kept,
    )


def merge_ranks(examined: Iterable[RankDetections]) -> tuple[Finding, ...]:
    """Put the ranks' answers together and look for what only all of them show."""
    ranks = tuple(examined)
    job = JobContext(
        tuple(one.totals for one in ranks), tuple(one.comparison_rows for one in ranks)
    )
    found = []
    for name, (pattern, _) in RANK_PATTERNS.items():
        own = [(one.totals, hit) for one in ranks for known, hit in one.detections if known == name]
        if own:
            found.append(_of_ranks(pattern, own, job))
    if len(ranks) > 1:
        for pattern, detector in CROSS_RANK_PATTERNS.values():
            for hit, culprits, sharers in detector(job):
                if _matters(pattern, hit, job.window_ns):
                    capped = _within(hit, job.window_ns)
                    found.append(_of_all(pattern, capped, culprits, sharers, job))
    return _ranked(found)


def _ranked(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The costliest first, and what follows from another finding directly after that."""
    shares = {one.name: one.gpu_share or 0.0 for one in found}
    causes: list[Finding] = []
    consequences: dict[str, list[Finding]] = {}
    for one in sorted(found, key=_by_cost):
        cause = _cause(one.name, shares)
        if cause:
            consequences.setdefault(cause, []).append(
                msgspec.structs.replace(one, explained_by=cause)
            )
        else:
            causes.append(one)
    return tuple(each for one in causes for each in (one, *consequences.pop(one.name, ())))


def _cause(name: str, shares: dict[str, float]) -> str:
    """The costliest finding that explains half of this one or more."""
    known = next((causes for start, causes in CONSEQUENCES if name.startswith(start)), ())
    able = [cause for cause in known if shares.get(cause, 0.0) >= shares[name] / 2 > 0]
    return max(able, key=lambda cause: shares[cause], default="")


def _matters(pattern: Pattern, hit: Detection, window_ns: float) -> bool:
    return hit.cost_ns is None or hit.cost_ns >= pattern.min_cost * window_ns > 0


def _within(hit: Detection, window_ns: float) -> Detection:
    """The hit with a cost of the whole time at most: what runs at once is saved once."""
    return hit if hit.cost_ns is None else hit._replace(cost_ns=min(hit.cost_ns, window_ns))


def _by_cost(finding: Finding) -> tuple[float, str]:
    return (-(finding.gpu_share or 0.0), finding.name)


def _remedy(pattern: Pattern, hit: Detection, num_spans: int, job: JobContext) -> str:
    """What to change, for what the run is; of a handful of kernels nobody can say."""
    if num_spans < MIN_SPANS_FOR_ADVICE and pattern.family in _OF_LOOPS:
        return (
            f"only {num_spans} kernels and copies are recorded, too few to advise on: profile "
            "several whole steps, schedule(wait=1, warmup=2, active=3)"
        )
    return hit.remedy or pattern.select_remedy(
        trains=job.is_training, on_rocm=job.is_rocm, framework=job.framework
    )


def _of_ranks(
    pattern: Pattern, own: list[tuple[RankTotals, Detection]], job: JobContext
) -> Finding:
    """One finding of all ranks that show it; the evidence is that of the one it costs most."""
    worst, hit = max(own, key=lambda item: (item[1].cost_ns or 0.0) / max(1, item[0].window_ns))
    windows = sum(one.window_ns for one in job.rank_totals)
    costs = [one.cost_ns for _, one in own if one.cost_ns is not None]
    per_step = [
        one.cost_ns / summary.num_steps / 1e6
        for summary, one in own
        if one.cost_ns is not None and summary.num_steps
    ]
    where = f"rank {worst.rank}: " if len(job.rank_totals) > 1 else ""
    return Finding(
        name=pattern.name,
        title=pattern.title,
        family=pattern.family,
        evidence=tuple(f"{where}{line}" for line in hit.evidence),
        ranks=tuple(sorted(summary.rank for summary, _ in own)),
        cost_ms_per_step=sum(per_step) / len(per_step) if per_step else None,
        gpu_share=sum(costs) / windows if costs and windows else None,
        cost_basis=pattern.cost_basis,
        remedy=_remedy(pattern, hit, worst.num_spans, job),
        spans=tuple((worst.rank, start, end) for start, end in hit.spans[:MAX_SPANS]),
    )


def _of_all(
    pattern: Pattern, hit: Detection, culprits: tuple[int, ...], sharers: int, job: JobContext
) -> Finding:
    """A finding whose cost several ranks pay."""
    cost = hit.cost_ns
    windows = sum(one.window_ns for one in job.rank_totals)
    steps = next((one.num_steps for one in job.rank_totals if one.num_steps), None)
    first = culprits[0] if culprits else 0
    return Finding(
        name=pattern.name,
        title=pattern.title,
        family=pattern.family,
        evidence=hit.evidence,
        ranks=culprits,
        cost_ms_per_step=cost / steps / 1e6 if cost is not None and steps else None,
        gpu_share=cost * sharers / windows if cost is not None and windows else None,
        cost_basis=pattern.cost_basis,
        remedy=_remedy(pattern, hit, max(one.num_spans for one in job.rank_totals), job),
        spans=tuple((first, start, end) for start, end in hit.spans[:MAX_SPANS]),
    )
