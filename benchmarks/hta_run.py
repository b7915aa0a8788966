"""Runs Holistic Trace Analysis on a folder of traces, in a process and an interpreter of its own.

What is run is what its documentation lists for a trace: temporal breakdown, overlap, idle time,
kernel breakdown, launch statistics, queue lengths, memory bandwidth, stragglers; where it is asked
for, the critical path of rank 0's second step. Needs HolisticTraceAnalysis, nothing of ours.

    python hta_run.py FOLDER [--critical-path]
"""

import importlib
import json
import logging
import resource
import sys
from collections.abc import Callable
from typing import Any


def cpu_s() -> float:
    """CPU seconds of this process and of all it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(folder: str, critical_path: bool) -> dict[str, Any]:
    """Analyse a folder; return seconds by stage, what failed, and the figures to compare."""
    logging.disable(logging.CRITICAL)
    stages: dict[str, float] = {}
    failed: dict[str, str] = {}

    def stage(name: str, run: Callable[[], Any]) -> Any:
        start = cpu_s()
        try:
            return run()
        except Exception as error:  # noqa: BLE001  what the peer cannot do is a result too
            failed[name] = f"{type(error).__name__}: {error}"[:200]
            return None
        finally:
            stages[name] = cpu_s() - start

    module = stage("import", lambda: importlib.import_module("hta.trace_analysis"))
    found = stage("parse", lambda: module.TraceAnalysis(trace_dir=folder))
    if found is None:
        return {"stages": stages, "failed": failed, "temporal": [], "overlap": []}
    ranks = sorted(found.t.traces)
    quiet = {"visualize": False}
    temporal = stage("temporal", lambda: found.get_temporal_breakdown(**quiet))
    overlap = stage("overlap", lambda: found.get_comm_comp_overlap(**quiet))
    stage("idle", lambda: [found.get_idle_time_breakdown(ranks=[r], **quiet) for r in ranks])
    stage("kernels", lambda: found.get_gpu_kernel_breakdown(**quiet, include_memory_kernels=True))
    stage("launches", lambda: found.get_cuda_kernel_launch_stats(ranks=ranks, **quiet))
    stage("queues", lambda: found.get_queue_length_summary(ranks=ranks))
    stage("bandwidth", lambda: found.get_memory_bw_summary(ranks=ranks))
    stage("stragglers", lambda: found.get_potential_stragglers(num_candidates=2))
    if critical_path:
        step = {"annotation": "ProfilerStep", "instance_id": 1}
        stage("critical path", lambda: found.critical_path_analysis(rank=ranks[0], **step))
    return {
        "stages": stages,
        "failed": failed,
        "temporal": json.loads(temporal.to_json(orient="records")),
        "overlap": json.loads(overlap.to_json(orient="records")),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], "--critical-path" in sys.argv)))
