"""Patterns of what the host does instead of launching: data, compilers, collectors, files."""

from collections.abc import Callable

import numpy as np

from meshwright.observe.analyze.spans import covered
from meshwright.observe.analyze.stalls import stalls_of
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import longest_of, names_of, per_step, took


def _meanwhile(
    name: str,
    title: str,
    *,
    what: str,
    cause: str,
    detected: str,
    remedy: str,
    lasting: bool = False,
    exact: Callable[[Rank], str] = lambda _: "",
    more: Callable[[Rank], tuple[str, ...]] = lambda _: (),
) -> None:
    """A pattern of late gaps that one of `Rank.claims` has.

    A `lasting` one has to go on in the second half of the window: else it is warm-up. `exact` words
    the remedy for this rank, `more` adds evidence.
    """
    rule = f"late gaps {detected}"

    @of_rank(Pattern(name, title, "host", rule, "measured: those gaps", remedy))
    def detector(rank: Rank) -> Hit | None:
        cost, rows = rank.claimed_ns(cause), rank.host_rows(cause)
        if not cost or (lasting and not rank.goes_on(rows)):
            return None
        evidence = (
            f"{what}: {per_step(rank, rank.host_time(cause).start.size)}, device idle {took(cost)} "
            "meanwhile",
            names_of(rank, rows),
            *more(rank),
        )
        return Hit(cost, evidence, longest_of(rank.claims[cause]), exact(rank))


def _alone(rank: Rank) -> str:
    if not any("_SingleProcessDataLoaderIter" in name for name in rank.part.strings("name").values):
        return ""
    return (
        "the loader runs in the training process: DataLoader(num_workers=8, pin_memory=True, "
        "persistent_workers=True) instead of num_workers=0"
    )


def _again(rank: Rank) -> tuple[str, ...]:
    again = stalls_of(rank.part).recompiled
    return (f"regions compiled again: {', '.join(again[:6])}",) if again else ()


_meanwhile(
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
_meanwhile(
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
_meanwhile(
    "garbage-collection",
    "Python's garbage collector stops the host",
    what="collections",
    cause="collecting",
    detected="while Python collects garbage (spans `Python GC`, gc.collect)",
    remedy="gc.disable() in the loop and gc.collect() at the same step on all ranks every "
    "N steps, or gc.freeze() after the first step",
)
_meanwhile(
    "checkpoint-stall",
    "The device waits for a checkpoint or an evaluation",
    what="saves or evaluations",
    cause="saving",
    detected="while the host is in spans that save a checkpoint or, in training, evaluate",
    remedy="torch.distributed.checkpoint.async_save(...); save and evaluate less often",
)
_meanwhile(
    "allocator-churn",
    "Device memory is allocated and freed in the loop",
    what="calls of the driver's allocator",
    cause="allocating",
    detected="in cudaMalloc, cudaFree and their like, in the second half of the profile too",
    remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; no torch.cuda.empty_cache() in "
    "the loop; leave memory free (smaller batch) so that the cache is not flushed",
    lasting=True,
)


@of_rank(
    Pattern(
        name="warm-up-included",
        title="The profile holds warm-up",
        family="host",
        detected="late gaps in launches of 5 ms and more (loading code), operators of 50 ms and "
        "more (searching algorithms, making a context), and compilations and allocations that only "
        "the first half shows",
        cost="measured: those gaps; a long run pays them once",
        remedy="skip the first steps: schedule(skip_first=10, wait=1, warmup=2, active=3); "
        "run a step before the profiler starts",
    )
)
def warm_up_included(rank: Rank) -> Hit | None:
    """Once-only work inside the profile."""
    cost = rank.claimed_ns("starting")
    if not cost:
        return None
    start, end = rank.starting
    lost = covered(rank.late_gaps, start, end)
    worst = int(np.argmax(lost))
    inside = rank.host & (rank.start == start[worst])
    rows = np.flatnonzero(inside & (rank.end <= end[worst]))
    evidence = (
        f"{int((lost > 0).sum())} calls that load, compile or search: device idle {took(cost)}",
        f"the costliest: {took(lost[worst])} in {names_of(rank, rows, 1)}",
    )
    return Hit(cost, evidence, longest_of(rank.claims["starting"]))
