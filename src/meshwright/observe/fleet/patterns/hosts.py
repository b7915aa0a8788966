"""What the nodes of each job did meanwhile: cores, host memory, shared storage."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.observe.fleet.patterns.arrays import (
    Floats,
    Ints,
    floats,
    mean_where,
    slice_most,
    slice_sums,
)
from meshwright.observe.fleet.patterns.held import Held
from meshwright.observe.fleet.patterns.places import Places
from meshwright.observe.fleet.patterns.uses import step_of, value

FIGURES = ("cpu_util", "io_wait", "read", "written", "metadata", "memory_used", "net_tx")


class Hosts(msgspec.Struct, frozen=True, eq=False):
    """One row for each node of each job."""

    job: Ints
    node: Ints
    gpus: Floats
    """How many of the node's GPUs the job had."""
    seen_s: Floats
    values: Mapping[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        """A figure of each."""
        return self.values[name]


def hosts_of(table: Any, held: Held, places: Places) -> Hosts:
    """Reduce samples of nodes to the jobs that had GPUs there."""
    pairs = held.job * max(places.number, 1) + held.node
    key, first, where = np.unique(pairs, return_index=True, return_inverse=True)
    gpus = np.bincount(where, held.share, minlength=key.size).astype(np.float64)
    job, node = held.job[first], held.node[first]
    start, end = held.start_s[first], held.end_s[first]
    series, time = places.codes(table), floats(table, "time_s")
    if not series.size or not key.size:
        none = np.full(key.size, np.nan)
        figures = dict.fromkeys((*FIGURES, "peak_memory_used", "peak_cpu_util"), none)
        return Hosts(job, node, gpus, np.zeros(key.size), figures)
    order = np.lexsort((time, series))
    table, series, time = table.take(order), series[order], time[order]
    step = step_of(time, series)
    begin, span = float(time.min()), float(time.max() - time.min()) + 10 * step
    ramp = (time - begin) + series * span
    low = np.searchsorted(ramp, np.clip(start - begin, 0, span - step) + node * span)
    end_at = np.clip(end - begin - step, -1e-6, span - step) + node * span
    high = np.maximum(np.searchsorted(ramp, end_at, side="right"), low)
    values = {name: mean_where(value(table, name), None, low, high) for name in FIGURES}
    for name in ("memory_used", "cpu_util"):
        values[f"peak_{name}"] = slice_most(value(table, name), low, high)
    seen = step * slice_sums(np.ones(time.size), low, high)
    return Hosts(job, node, gpus, seen, values)
