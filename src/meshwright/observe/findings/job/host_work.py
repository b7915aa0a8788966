"""Patterns of what the host does instead of launching: data, compilers, collectors, files."""

from collections.abc import Callable

import numpy as np

from meshwright.observe.analyze.device_time.host_stalls import analyze_rank_host_stalls
from meshwright.observe.analyze.spans.intervals import measure_covered_ns
from meshwright.observe.findings.job.evidence_format import (
    format_per_step,
    format_top_names,
    select_longest_intervals,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration


def _register_late_gap_pattern(
    name: str,
    title: str,
    *,
    what: str,
    cause: str,
    detected: str,
    remedy: str,
    lasting: bool = False,
    exact: Callable[[RankContext], str] = lambda _: "",
    more: Callable[[RankContext], tuple[str, ...]] = lambda _: (),
) -> None:
    """A pattern of late gaps that one of `RankContext.late_gaps_by_cause` has.

    A `lasting` one has to go on in the second half of the window: else it is warm-up. `exact` words
    the remedy for this rank, `more` adds evidence.
    """
    rule = f"late gaps {detected}"

    @detects_on_rank(Pattern(name, title, "host", rule, "measured: those gaps", remedy))
    def detector(rank: RankContext) -> Detection | None:
        cost, rows = rank.late_ns_by_cause(cause), rank.host_rows(cause)
        if not cost or (lasting and not rank.continues_after_warmup(rows)):
            return None
        evidence = (
            f"{what}: {format_per_step(rank, rank.host_intervals(cause).start.size)}, device idle "
            f"{format_duration(cost)} "
            "meanwhile",
            format_top_names(rank, rows),
            *more(rank),
        )
        return Detection(
            cost, evidence, select_longest_intervals(rank.late_gaps_by_cause[cause]), exact(rank)
        )


def _alone(rank: RankContext) -> str:
    if not any(
        "_SingleProcessDataLoaderIter" in name
        for name in rank.rank_timeline.string_column("name").values
    ):
        return ""
    return (
        "the loader runs in the training process: DataLoader(num_workers=8, pin_memory=True, "
        "persistent_workers=True) instead of num_workers=0"
    )


def _again(rank: RankContext) -> tuple[str, ...]:
    again = analyze_rank_host_stalls(rank.rank_timeline).recompiled_regions
    return (f"regions compiled again: {', '.join(again[:6])}",) if again else ()


_register_late_gap_pattern(
    "data-loader-stall",
    "The device waits for data",
    what="waits for a batch",
    cause="loading",
    detected="while the host is in the data loader's __next__, or in an annotation called load, "
    "get_batch, next_batch and the like",
    remedy="DataLoader(num_workers=8, pin_memory=True, persistent_workers=True, "
    "prefetch_factor=4); more workers until the stall is gone",
    exact=_alone,
)
_register_late_gap_pattern(
    "recompilation",
    "Code is compiled in the loop",
    what="compilations",
    cause="compiling",
    detected="while torch.compile compiles or modules are loaded, in the second half of the steps "
    "too; what only the first steps show is warm-up",
    remedy="TORCH_LOGS=recompiles names the guard; mark changing sizes with "
    "torch._dynamo.mark_dynamic(x, dim) or torch.compile(dynamic=True); pad to few sizes",
    lasting=True,
    more=_again,
)
_register_late_gap_pattern(
    "garbage-collection",
    "Python's garbage collector stops the host",
    what="collections",
    cause="collecting",
    detected="while Python collects garbage (spans `Python GC`, gc.collect)",
    remedy="gc.disable() in the loop and gc.collect() at the same step on all ranks every "
    "N steps, or gc.freeze() after the first step",
)
_register_late_gap_pattern(
    "checkpoint-stall",
    "The device waits for a checkpoint or an evaluation",
    what="saves or evaluations",
    cause="saving",
    detected="while the host is in spans that save a checkpoint or, in training, evaluate",
    remedy="torch.distributed.checkpoint.async_save(...); save and evaluate less often",
)
_register_late_gap_pattern(
    "allocator-churn",
    "Device memory is allocated and freed in the loop",
    what="calls of the driver's allocator",
    cause="allocating",
    detected="in cudaMalloc, cudaFree and their like, in the second half of the profile too",
    remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; no torch.cuda.empty_cache() in "
    "the loop; leave memory free (smaller batch) so that the cache is not flushed",
    lasting=True,
)


@detects_on_rank(
    Pattern(
        name="warmup-in-profile",
        title="The profile includes warm-up steps",
        family="host",
        rule="late gaps in launches of 5 ms and more (loading code), operators of 50 ms and "
        "more (searching algorithms, making a context), and compilations and allocations that only "
        "the first half shows",
        cost_basis="measured: those gaps; a long run pays them once",
        remedy="skip the first steps: schedule(skip_first=10, wait=1, warmup=2, active=3); "
        "run a step before the profiler starts",
    )
)
def detect_profiled_warmup(rank: RankContext) -> Detection | None:
    """Once-only work inside the profile."""
    cost = rank.late_ns_by_cause("starting")
    if not cost:
        return None
    start, end = rank.first_call_intervals
    lost = measure_covered_ns(rank.late_gaps, start, end)
    worst = int(np.argmax(lost))
    inside = rank.is_host & (rank.start == start[worst])
    rows = np.flatnonzero(inside & (rank.end <= end[worst]))
    evidence = (
        f"{int((lost > 0).sum())} calls that load, compile or search: device idle "
        f"{format_duration(cost)}",
        f"the costliest: {format_duration(lost[worst])} in {format_top_names(rank, rows, 1)}",
    )
    return Detection(cost, evidence, select_longest_intervals(rank.late_gaps_by_cause["starting"]))
