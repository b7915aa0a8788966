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
        from meshwright.cli.main import main

        with redirect_stdout(io.StringIO()):
            main(["analyze", folder, "--no-cache"])
        return {}
    if what == "figures":
        return _compat(folder)
    # What is imported on first use is imported here: imports are counted apart, as HTA's are.
    import numpy.ma  # noqa: F401  by numpy's own `unique`

    from meshwright.observe.analyze import critical_path  # noqa: F401
    from meshwright.observe.runs import overview
    from meshwright.predict import network  # noqa: F401
    from meshwright.spec.catalog import hardware  # noqa: F401
    from meshwright.timeline.readers import kineto, traces  # noqa: F401
    from meshwright.timeline.readers.cache import Cache

    stages = {"import": time.process_time() - start}
    start = time.process_time()
    if what == "standard":
        spans, ranks = _standard(folder)
        stages["all"] = time.process_time() - start
        return {"stages": stages, "spans": spans, "ranks": ranks}
    if what == "overview":
        found = overview(folder, findings=False)
        spans = sum(one.num_spans for one in found.ranks)
        stages["all"] = time.process_time() - start
        return {"stages": stages, "spans": spans, "ranks": len(found.ranks)}
    cache = Cache(Path(os.environ[CACHE])) if what == "cached read" else None
    for part in traces.read_each(folder, detail="shapes", cache=cache):
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
    from meshwright.observe.analyze.breakdown import breakdown_of
    from meshwright.observe.analyze.clocks import on_one_clock
    from meshwright.observe.analyze.critical_path import critical_path
    from meshwright.observe.analyze.idle import idle_of
    from meshwright.observe.analyze.kernels import kernels_of
    from meshwright.observe.analyze.launches import launches_of
    from meshwright.observe.analyze.overlap import overlap_of
    from meshwright.observe.analyze.selection import for_comparing
    from meshwright.observe.analyze.steps import steps_of
    from meshwright.observe.analyze.stragglers import stragglers
    from meshwright.observe.analyze.summary import MOST_SPANS_ON_PATH
    from meshwright.timeline.readers.traces import choose_traces, read_each

    spans, kept, found = 0, [], []
    several = len(choose_traces(folder)) > 1
    for part in read_each(folder):
        spans += part.num_spans
        analyses = (breakdown_of, overlap_of, idle_of, kernels_of, launches_of)
        found.append([analyse(part) for analyse in analyses])
        marks = steps_of(part).steps
        if len(found) == 1 and marks and part.num_spans < MOST_SPANS_ON_PATH:
            critical_path(part, step=marks[len(marks) // 2].number)
        if several:
            kept.append(for_comparing(part))
    if several:
        together = on_one_clock(*kept)
        stragglers(together.whole, together.collectives)
    return spans, len(found)


def _compat(folder: str) -> dict[str, Any]:
    """The figures that HTA prints, by its rules, rank by rank."""
    from meshwright.observe.analyze.hta.device_time import overlap_percent, temporal_breakdown
    from meshwright.observe.analyze.hta.frame import frames
    from meshwright.timeline.readers.traces import read_each

    rows, overlaps = [], []
    for part in read_each(folder, detail="full"):
        (frame,) = frames(part)
        found = temporal_breakdown(frame)
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
        overlaps.append((found.rank, overlap_percent(frame)))
    return {
        "temporal": [row for _, row in sorted(rows, key=lambda item: item[0])],
        "overlap": [value for _, value in sorted(overlaps, key=lambda item: item[0])],
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(case(*sys.argv[1:3])))
