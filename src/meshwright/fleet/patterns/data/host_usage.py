"""What the nodes of each job did meanwhile: cores, host memory, shared storage."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.fleet.columns import read_floats
from meshwright.fleet.patterns.data.allocation_columns import AllocationColumns
from meshwright.fleet.patterns.data.group_math import (
    Floats,
    Ints,
    mean_where,
    slice_max,
    slice_sums,
)
from meshwright.fleet.patterns.data.node_index import NodeIndex
from meshwright.fleet.patterns.data.utilization import estimate_sample_step, metric_mean

HOST_METRICS = (
    "cpu_util",
    "io_wait",
    "storage_read",
    "storage_write",
    "metadata_ops",
    "memory_used",
    "net_tx",
)


class HostUsage(msgspec.Struct, frozen=True, eq=False):
    """One row for each node of each job."""

    job: Ints
    node: Ints
    num_gpus: Floats
    """How many of the node's GPUs the job had."""
    sampled_s: Floats
    values: Mapping[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        """A figure of each."""
        return self.values[name]


def build_host_usage(table: Any, allocations: AllocationColumns, places: NodeIndex) -> HostUsage:
    """Reduce samples of nodes to the jobs that had GPUs there."""
    pairs = allocations.job * max(places.num_nodes, 1) + allocations.node
    key, first, where = np.unique(pairs, return_index=True, return_inverse=True)
    gpus = np.bincount(where, allocations.gpu_fraction, minlength=key.size).astype(np.float64)
    job, node = allocations.job[first], allocations.node[first]
    start, end = allocations.start_s[first], allocations.end_s[first]
    series, time = places.codes(table), read_floats(table, "time_s")
    if not series.size or not key.size:
        none = np.full(key.size, np.nan)
        figures = dict.fromkeys((*HOST_METRICS, "peak_memory_used", "peak_cpu_util"), none)
        return HostUsage(job, node, gpus, np.zeros(key.size), figures)
    order = np.lexsort((time, series))
    table, series, time = table.take(order), series[order], time[order]
    step = estimate_sample_step(time, series)
    begin, span = float(time.min()), float(time.max() - time.min()) + 10 * step
    ramp = (time - begin) + series * span
    low = np.searchsorted(ramp, np.clip(start - begin, 0, span - step) + node * span)
    end_at = np.clip(end - begin - step, -1e-6, span - step) + node * span
    high = np.maximum(np.searchsorted(ramp, end_at, side="right"), low)
    values = {name: mean_where(metric_mean(table, name), None, low, high) for name in HOST_METRICS}
    for name in ("memory_used", "cpu_util"):
        values[f"peak_{name}"] = slice_max(metric_mean(table, name), low, high)
    seen = step * slice_sums(np.ones(time.size), low, high)
    return HostUsage(job, node, gpus, seen, values)
