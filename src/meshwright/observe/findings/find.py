"""Looks for every pattern, puts what ranks show alike together, ranks it by cost and cause.

find(timelines)                  all of it: one timeline per rank, each read once
examine(rank)                    what one rank shows; may run in another process
combine(examined)                the ranks' answers together, with what only all show
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.finding import Finding
from meshwright.observe.findings.job import Job, Summary, kept_of, summary_of
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import (
    JOB_PATTERNS,
    MAX_SPANS,
    RANK_PATTERNS,
    Hit,
    Pattern,
)
from meshwright.timeline.timeline import Timeline

FEWEST_TO_ADVISE = 20
"""With fewer device spans a trace shows calls by hand and no loop whose settings could be told."""
_OF_LOOPS = ("launching", "arithmetic", "passes", "communication")
_HOST = (
    "data-loader-stall", "recompilation", "warm-up-included", "garbage-collection",
    "checkpoint-stall", "allocator-churn",
)  # fmt: skip
_STRAGGLERS = (
    "straggler-slow-kernels", "straggler-more-work", "straggler-late-host", "straggler-data-wait",
    "rotating-stragglers", "slow-link",
)  # fmt: skip
_WAYS = ("communication-on-compute-stream", "small-collectives", "barrier-in-loop")
CONSEQUENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("exposed-", (*_STRAGGLERS, *_WAYS, "pipeline-bubble", "low-bus-bandwidth")),
    ("step-outliers", _HOST),
    ("step-time-change", ("kernels-slow-down", *_HOST)),
    ("tiny-kernels", ("unfused-optimizer", "fill-storm")),
    ("output-copy-exposed", ("host-round-trip",)),
    ("input-copy-not-overlapped", ("host-round-trip",)),
)
"""How a pattern's name begins, and the patterns it may be a consequence of; no cause is one."""


class Examined(NamedTuple):
    """What one rank shows, and what is kept to compare it with others."""

    summary: Summary
    hits: tuple[tuple[str, Hit], ...]
    kept: Timeline


def find(timelines: Iterable[Timeline]) -> tuple[Finding, ...]:
    """Every inefficiency of a run, costliest first; what costs no time comes last."""
    return combine(examine(Rank(part)) for timeline in timelines for part in per_device(timeline))


def examine(rank: Rank, kept: Timeline | None = None) -> Examined:
    """Look for what one rank shows; `kept` are the rows to compare it by, where they are known."""
    hits = []
    if rank.window_ns:
        for pattern, detector in RANK_PATTERNS.values():
            hit = detector(rank)
            if hit is not None and _matters(pattern, hit, rank.window_ns):
                hits.append((pattern.name, _within(hit, rank.window_ns)))
    return Examined(summary_of(rank), tuple(hits), kept_of(rank.part) if kept is None else kept)


def combine(examined: Iterable[Examined]) -> tuple[Finding, ...]:
    """Put the ranks' answers together and look for what only all of them show."""
    ranks = tuple(examined)
    job = Job(tuple(one.summary for one in ranks), tuple(one.kept for one in ranks))
    found = []
    for name, (pattern, _) in RANK_PATTERNS.items():
        own = [(one.summary, hit) for one in ranks for known, hit in one.hits if known == name]
        if own:
            found.append(_of_ranks(pattern, own, job))
    if len(ranks) > 1:
        for pattern, detector in JOB_PATTERNS.values():
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
            consequences.setdefault(cause, []).append(msgspec.structs.replace(one, follows=cause))
        else:
            causes.append(one)
    return tuple(each for one in causes for each in (one, *consequences.pop(one.name, ())))


def _cause(name: str, shares: dict[str, float]) -> str:
    """The costliest finding that explains half of this one or more."""
    known = next((causes for start, causes in CONSEQUENCES if name.startswith(start)), ())
    able = [cause for cause in known if shares.get(cause, 0.0) >= shares[name] / 2 > 0]
    return max(able, key=lambda cause: shares[cause], default="")


def _matters(pattern: Pattern, hit: Hit, window_ns: float) -> bool:
    return hit.cost_ns is None or hit.cost_ns >= pattern.least_share * window_ns > 0


def _within(hit: Hit, window_ns: float) -> Hit:
    """The hit with a cost of the whole time at most: what runs at once is saved once."""
    return hit if hit.cost_ns is None else hit._replace(cost_ns=min(hit.cost_ns, window_ns))


def _by_cost(finding: Finding) -> tuple[float, str]:
    return (-(finding.gpu_share or 0.0), finding.name)


def _remedy(pattern: Pattern, hit: Hit, num_spans: int, job: Job) -> str:
    """What to change, for what the run is; of a handful of kernels nobody can say."""
    if num_spans < FEWEST_TO_ADVISE and pattern.family in _OF_LOOPS:
        return (
            f"only {num_spans} kernels and copies are recorded, too few to advise on: profile "
            "several whole steps, schedule(wait=1, warmup=2, active=3)"
        )
    return hit.remedy or pattern.remedy_for(
        trains=job.trains, on_rocm=job.on_rocm, framework=job.framework
    )


def _of_ranks(pattern: Pattern, own: list[tuple[Summary, Hit]], job: Job) -> Finding:
    """One finding of all ranks that show it; the evidence is that of the one it costs most."""
    worst, hit = max(own, key=lambda item: (item[1].cost_ns or 0.0) / max(1, item[0].window_ns))
    windows = sum(one.window_ns for one in job.summaries)
    costs = [one.cost_ns for _, one in own if one.cost_ns is not None]
    per_step = [
        one.cost_ns / summary.num_steps / 1e6
        for summary, one in own
        if one.cost_ns is not None and summary.num_steps
    ]
    where = f"rank {worst.rank}: " if len(job.summaries) > 1 else ""
    return Finding(
        name=pattern.name,
        title=pattern.title,
        evidence=tuple(f"{where}{line}" for line in hit.evidence),
        ranks=tuple(sorted(summary.rank for summary, _ in own)),
        cost_ms_per_step=sum(per_step) / len(per_step) if per_step else None,
        gpu_share=sum(costs) / windows if costs and windows else None,
        remedy=_remedy(pattern, hit, worst.num_spans, job),
        spans=tuple((worst.rank, start, end) for start, end in hit.spans[:MAX_SPANS]),
    )


def _of_all(
    pattern: Pattern, hit: Hit, culprits: tuple[int, ...], sharers: int, job: Job
) -> Finding:
    """A finding whose cost several ranks pay."""
    cost = hit.cost_ns
    windows = sum(one.window_ns for one in job.summaries)
    steps = next((one.num_steps for one in job.summaries if one.num_steps), None)
    first = culprits[0] if culprits else 0
    return Finding(
        name=pattern.name,
        title=pattern.title,
        evidence=hit.evidence,
        ranks=culprits,
        cost_ms_per_step=cost / steps / 1e6 if cost is not None and steps else None,
        gpu_share=cost * sharers / windows if cost is not None and windows else None,
        remedy=_remedy(pattern, hit, max(one.num_spans for one in job.summaries), job),
        spans=tuple((first, start, end) for start, end in hit.spans[:MAX_SPANS]),
    )
