"""Which GPUs a pod holds, where that is certain without being told: all of its node."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from meshwright.fleet.tables import ALLOCATIONS


def infer_whole_node_allocations(
    jobs: Iterable[Mapping[str, Any]], gpus: Mapping[str, float], seen_s: float
) -> pa.Table:
    """Return rows of `allocations` for attempts with all GPUs of their node; `gpus` is by node.

    Which of several GPUs a pod has only labels of dcgm-exporter tell.
    """
    rows = [
        {
            "cluster": job["cluster"],
            "job": job["job"],
            "attempt": job["attempt"],
            "node": node,
            "gpu": gpu,
            "start_s": job["start_s"],
            "end_s": job["end_s"] if job["end_s"] is not None else seen_s,
            "gpu_fraction": 1.0,
            "seen_s": seen_s,
        }
        for job in jobs
        if job["start_s"] is not None and job["state"] != "unknown"
        for node in job["nodes"] or ()
        if job["gpus"] >= 1 and job["gpus"] == gpus.get(node)
        for gpu in range(int(job["gpus"]))
    ]
    return pa.Table.from_pylist(rows, schema=ALLOCATIONS)
