"""The jobs of `hta_analysis`, each done in a process of its own; prints what it took.

python -m benchmarks.hta_jobs standard|overview|command|figures|read|"cached read" FOLDER
"""

import io
import json
import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

CACHE = "HTA_CACHE"
"""The variable that names the cache of `cached read`."""


def case(what: str, folder: str) -> dict[str, Any]:
    """Do one job in this process."""
    start = time.process_time()
    if what == "command":
        from meshwright.cli import main

        with redirect_stdout(io.StringIO()):
            main(["analyze", folder, "--no-cache"])
        return {}
    if what == "figures":
        return _compat(folder)
    # What is imported on first use is imported here: imports are counted apart, as HTA's are.
    import numpy.ma  # noqa: F401  by numpy's own `unique`

    from meshwright.observe.analyze import critical_path  # noqa: F401
    from meshwright.observe.overview import analyze_run
    from meshwright.predict import network  # noqa: F401
    from meshwright.spec.catalog import hardware  # noqa: F401
    from meshwright.timeline.readers import trace_folder
    from meshwright.timeline.readers.kineto import kineto_reader  # noqa: F401
    from meshwright.timeline.readers.trace_cache import TraceCache

    stages = {"import": time.process_time() - start}
    start = time.process_time()
    if what == "standard":
        spans, ranks = _standard(folder)
        stages["all"] = time.process_time() - start
        return {"stages": stages, "spans": spans, "ranks": ranks}
    if what == "overview":
        found = analyze_run(folder, with_findings=False)
        spans = sum(one.num_spans for one in found.ranks)
        stages["all"] = time.process_time() - start
        return {"stages": stages, "spans": spans, "ranks": len(found.ranks)}
    cache = TraceCache(Path(os.environ[CACHE])) if what == "cached read" else None
    for part in trace_folder.iter_timelines(folder, detail="shapes", cache=cache):
        part.column("start_ns").max()
    stages["all"] = time.process_time() - start
    return {"stages": stages}


def _standard(folder: str) -> tuple[int, int]:
    """What `hta_run` asks of HTA: each of its analyses has its counterpart here.

    Breakdown, overlap, idle causes, kernels (with the bandwidth of copies), launches and queues of
    every rank, one after another; then stragglers, by collectives matched across the ranks; and
    the critical path of one step of the first rank, unless the trace is so large that `mw analyze`
    leaves it out, as it is left out for HTA.
    """
    from meshwright.observe.analyze.collectives.clock_alignment import align_ranks
    from meshwright.observe.analyze.collectives.stragglers import find_stragglers
    from meshwright.observe.analyze.compute_efficiency.kernel_table import analyze_rank_kernels
    from meshwright.observe.analyze.critical_path import find_critical_path
    from meshwright.observe.analyze.device_time.breakdown import analyze_rank_breakdown
    from meshwright.observe.analyze.device_time.idle_time import analyze_rank_idle
    from meshwright.observe.analyze.device_time.launches import analyze_rank_launches
    from meshwright.observe.analyze.device_time.overlap import analyze_rank_overlap
    from meshwright.observe.analyze.rank_summary import MAX_CRITICAL_PATH_SPANS
    from meshwright.observe.analyze.spans.row_selection import select_comparison_rows
    from meshwright.observe.analyze.spans.steps import find_rank_steps
    from meshwright.timeline.readers.trace_folder import choose_traces, iter_timelines

    spans, kept, found = 0, [], []
    several = len(choose_traces(folder)) > 1
    for part in iter_timelines(folder):
        spans += part.num_spans
        analyses = (
            analyze_rank_breakdown,
            analyze_rank_overlap,
            analyze_rank_idle,
            analyze_rank_kernels,
            analyze_rank_launches,
        )
        found.append([analyse(part) for analyse in analyses])
        marks = find_rank_steps(part).steps
        if len(found) == 1 and marks and part.num_spans < MAX_CRITICAL_PATH_SPANS:
            find_critical_path(part, step=marks[len(marks) // 2].number)
        if several:
            kept.append(select_comparison_rows(part))
    if several:
        together = align_ranks(*kept)
        find_stragglers(together.timeline, together.collectives)
    return spans, len(found)


def _compat(folder: str) -> dict[str, Any]:
    """The figures that HTA prints, by its rules, rank by rank."""
    from meshwright.observe.analyze.hta.hta_device_time import (
        get_comm_comp_overlap,
        get_temporal_breakdown,
    )
    from meshwright.observe.analyze.hta.hta_frame import build_frames
    from meshwright.timeline.readers.trace_folder import iter_timelines

    rows, overlaps = [], []
    for part in iter_timelines(folder, detail="full"):
        (frame,) = build_frames(part)
        found = get_temporal_breakdown(frame)
        rows.append(
            (
                found.rank,
                {
                    "idle": found.idle_us,
                    "compute": found.compute_us,
                    "non_compute": found.non_compute_us,
                    "kernel": found.kernel_us,
                },
            )
        )
        overlaps.append((found.rank, get_comm_comp_overlap(frame)))
    return {
        "temporal": [row for _, row in sorted(rows, key=lambda item: item[0])],
        "overlap": [value for _, value in sorted(overlaps, key=lambda item: item[0])],
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(case(*sys.argv[1:3])))
