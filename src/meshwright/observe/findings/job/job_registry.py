"""Registry of job pattern detectors: decorators for single-rank and cross-rank detectors."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from meshwright.observe.findings.job.job_context import JobContext
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import CrossRankDetection, Detection, Pattern

JOB_FAMILIES = (
    "launch", "synchronization", "host", "copies", "optimizer", "gemm", "fusion", "communication",
    "steps", "memory", "ranks",
)  # fmt: skip
"""In the order of the documentation."""

RankDetector = Callable[[RankContext], Detection | None]

CrossRankDetector = Callable[[JobContext], Iterable[CrossRankDetection]]

RANK_PATTERNS: dict[str, tuple[Pattern, RankDetector]] = {}

CROSS_RANK_PATTERNS: dict[str, tuple[Pattern, CrossRankDetector]] = {}

_R = TypeVar("_R", bound=RankDetector)

_J = TypeVar("_J", bound=CrossRankDetector)


def detects_on_rank(pattern: Pattern) -> Callable[[_R], _R]:
    """Register a detector that reads one rank."""

    def register(detector: _R) -> _R:
        assert pattern.name not in RANK_PATTERNS | CROSS_RANK_PATTERNS, pattern.name
        RANK_PATTERNS[pattern.name] = (pattern, detector)
        return detector

    return register


def detects_across_ranks(pattern: Pattern) -> Callable[[_J], _J]:
    """Register a detector that compares ranks."""

    def register(detector: _J) -> _J:
        assert pattern.name not in RANK_PATTERNS | CROSS_RANK_PATTERNS, pattern.name
        CROSS_RANK_PATTERNS[pattern.name] = (pattern, detector)
        return detector

    return register
