"""Patterns of what the host does instead of launching: data, compilers, collectors, files."""

import numpy as np

from meshwright.observe.analyze.spans import covered
from meshwright.observe.analyze.stalls import stalls_of
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import longest_of, names_of, per_step, took


def _claimed(rank: Rank, cause: str, what: str, remedy: str = "") -> Hit | None:
    cost = rank.claimed_ns(cause)
    rows = rank.host_rows(cause)
    if not cost:
        return None
    evidence = (
        f"{what}: {per_step(rank, rows.size)}, device idle {took(cost)} meanwhile",
        names_of(rank, rows),
    )
    return Hit(cost, evidence, longest_of(rank.claims[cause]), remedy)


@of_rank(
    Pattern(
        name="data-loader-stall",
        title="The device waits for data",
        family="host",
        detected="late gaps while the host is in the data loader's __next__",
        cost="measured: those gaps",
        remedy="DataLoader(num_workers=8, pin_memory=True, persistent_workers=True, "
        "prefetch_factor=4); more workers until the stall is gone",
    )
)
def data_loader_stall(rank: Rank) -> Hit | None:
    """The loader is slower than the step."""
    names = rank.part.strings("name").values
    alone = any("_SingleProcessDataLoaderIter" in name for name in names)
    remedy = (
        "the loader runs in the training process: DataLoader(num_workers=8, pin_memory=True, "
        "persistent_workers=True) instead of num_workers=0"
    )
    return _claimed(rank, "loading", "waits for a batch", remedy if alone else "")


@of_rank(
    Pattern(
        name="recompilation",
        title="Code is compiled in the loop",
        family="host",
        detected="late gaps while torch.compile compiles or modules are loaded, in the second half "
        "of the steps too; what only the first steps show is warm-up",
        cost="measured: those gaps",
        remedy="TORCH_LOGS=recompiles names the guard; mark changing sizes with "
        "torch._dynamo.mark_dynamic(x, dim) or torch.compile(dynamic=True); pad to few sizes",
    )
)
def recompilation(rank: Rank) -> Hit | None:
    """Compilation after the first steps."""
    rows = rank.host_rows("compiling")
    if not rows.size or not rank.goes_on(rows):
        return None
    hit = _claimed(rank, "compiling", "compilations")
    if hit is None:
        return None
    again = stalls_of(rank.part).recompiled
    more = (f"regions compiled again: {', '.join(again[:6])}",) if again else ()
    return hit._replace(evidence=hit.evidence + more)


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


@of_rank(
    Pattern(
        name="garbage-collection",
        title="Python's garbage collector stops the host",
        family="host",
        detected="late gaps while Python collects garbage (spans `Python GC`, gc.collect)",
        cost="measured: those gaps",
        remedy="gc.disable() in the loop and gc.collect() at the same step on all ranks every "
        "N steps, or gc.freeze() after the first step",
    )
)
def garbage_collection(rank: Rank) -> Hit | None:
    """Pauses of the collector."""
    return _claimed(rank, "collecting", "collections")


@of_rank(
    Pattern(
        name="checkpoint-stall",
        title="The device waits for a checkpoint or an evaluation",
        family="host",
        detected="late gaps while the host is in spans that save a checkpoint or evaluate",
        cost="measured: those gaps",
        remedy="torch.distributed.checkpoint.async_save(...); save and evaluate less often",
    )
)
def checkpoint_stall(rank: Rank) -> Hit | None:
    """Work at the edge of steps."""
    return _claimed(rank, "saving", "saves or evaluations")


@of_rank(
    Pattern(
        name="allocator-churn",
        title="Device memory is allocated and freed in the loop",
        family="host",
        detected="late gaps in cudaMalloc, cudaFree and their like, in the second half of the "
        "profile too",
        cost="measured: those gaps",
        remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; no torch.cuda.empty_cache() in "
        "the loop; leave memory free (smaller batch) so that the cache is not flushed",
    )
)
def allocator_churn(rank: Rank) -> Hit | None:
    """The caching allocator asks the driver again and again."""
    rows = rank.host_rows("allocating")
    if not rows.size or not rank.goes_on(rows):
        return None
    return _claimed(rank, "allocating", "calls of the driver's allocator")
