"""A library of named inefficiencies: what each looks like in a timeline, costs, and takes to mend.

find_inefficiencies   every inefficiency of a run, costliest first
detect_on_rank        what one rank shows (to run ranks in parallel); `merge_ranks` joins the ranks
list_patterns         the list itself
"""

from meshwright.observe.findings.job import (  # noqa: F401  importing them registers their patterns
    communication,
    gemm_efficiency,
    host_work,
    kernel_fusion,
    kernel_launch,
    memory_copies,
    memory_fragmentation,
    optimizer_step,
    rank_differences,
    step_variation,
    straggler_patterns,
    synchronization,
)
from meshwright.observe.findings.job.job_findings import (
    RankDetections,
    detect_on_rank,
    find_inefficiencies,
    merge_ranks,
)
from meshwright.observe.findings.job.job_registry import (
    CROSS_RANK_PATTERNS,
    JOB_FAMILIES,
    RANK_PATTERNS,
)
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Pattern


def list_patterns() -> tuple[Pattern, ...]:
    """Every pattern, family by family."""
    known = [pattern for pattern, _ in (*RANK_PATTERNS.values(), *CROSS_RANK_PATTERNS.values())]
    return tuple(sorted(known, key=lambda pattern: JOB_FAMILIES.index(pattern.family)))


__all__ = [
    "Pattern",
    "RankContext",
    "RankDetections",
    "detect_on_rank",
    "find_inefficiencies",
    "list_patterns",
    "merge_ranks",
]
