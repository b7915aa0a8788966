"""The same fleets seen by a poorer monitor: what is not collected, detectors must do without."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

Tables = Mapping[str, Any]
_PROFILED = ("sm_active", "tensor_active", "dram_active", "fp64_active", "fp32_active", "pcie_rx",
             "nvlink_tx")  # fmt: skip


def without_profiling(tables: Tables) -> dict[str, Any]:
    """No profiling counters on any node, as dcgm-exporter comes."""
    samples = tables["gpu_samples"]
    for name in samples.column_names:
        if name.removesuffix("_mean").removesuffix("_max") in _PROFILED:
            blank = pa.nulls(samples.num_rows, pa.float32())
            samples = samples.set_column(samples.column_names.index(name), name, blank)
    return {**tables, "gpu_samples": samples}


def with_gaps(tables: Tables) -> dict[str, Any]:
    """A third of all windows missing."""
    kept = np.random.default_rng(1).random(tables["gpu_samples"].num_rows) > 1 / 3
    return {**tables, "gpu_samples": tables["gpu_samples"].filter(pa.array(kept))}


def without_holders(tables: Tables) -> dict[str, Any]:
    """Nobody recorded which GPU was whose: only jobs with whole nodes are known by GPU."""
    return {**tables, "allocations": tables["allocations"].slice(0, 0)}


def without_progress(tables: Tables) -> dict[str, Any]:
    """No job tells of its phases."""
    return {**tables, "progress": tables["progress"].slice(0, 0)}


def only_accounting(tables: Tables) -> dict[str, Any]:
    """Nothing but what Slurm keeps: jobs and nodes."""
    return {name: tables[name] for name in ("jobs", "nodes")}


POORER: Mapping[str, Callable[[Tables], dict[str, Any]]] = {
    "no profiling counters": without_profiling,
    "a third of the windows missing": with_gaps,
    "GPUs of jobs not recorded": without_holders,
    "no metrics of jobs themselves": without_progress,
    "only accounting": only_accounting,
}
