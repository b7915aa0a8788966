"""One rank's events as Holistic Trace Analysis 0.5 keeps them, and its words for kernels.

Times are whole microseconds: starts rounded up, ends down, so that a short event may have a
negative length. An event is the device's where its arguments name a `stream`, whatever it is; the
last profiler step is cut off. The order of rows is HTA's too: it decides between equal times.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.hta.hta_trace_rows import (
    HtaTraceRows,
    build_hta_rows,
    check_arguments,
    mask_device_rows,
)
from meshwright.observe.analyze.spans.intervals import Flags, Ints
from meshwright.timeline.timeline import Timeline

COMPUTATION, COMMUNICATION, MEMORY, OTHER = "COMPUTATION", "COMMUNICATION", "MEMORY", "OTHER"
_COMMUNICATION = re.compile(r"nccl.*Kernel")
_MEMORY = re.compile(r"Memcpy|Memset|dma")
_NOT_COMPUTATION = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|.*Sync")


class HtaFrame(NamedTuple):
    """The events of one rank that HTA analyses, the device's before the host's."""

    rank: int
    ts: Ints
    """Start, µs."""
    duration: Ints
    """Length, µs; may be negative."""
    name: Ints
    names: Sequence[str]
    category: Ints
    categories: Sequence[str]
    stream: Ints
    """-1 where the arguments name none: the host."""
    correlation: Ints
    has_correlation: Flags
    """Whether the other end of the correlation is in the trace."""
    launch_ts: Ints
    """When the host's end of the correlation started; -1 where it is not among these events."""
    row: Ints
    """Row in the rank's timeline, without rows that have no category."""

    def take(self, which: Flags | Ints) -> "HtaFrame":
        """Only these rows, in the order given."""
        columns = {name: getattr(self, name)[which] for name in _COLUMNS}
        return self._replace(**columns)

    def mask_device(self) -> "HtaFrame":
        """What HTA takes for work of the device: every event with a stream."""
        return self.take(self.stream != -1)

    def match_names(self, names: Iterable[str]) -> Flags:
        """Which rows have one of these names."""
        wanted = set(names)
        has = np.array([name in wanted for name in self.names] + [False], dtype=np.bool_)
        rows: Flags = has[self.name]
        return rows

    def match_kernel_type(self, kernel_type: str) -> "HtaFrame":
        """Rows whose name is of this kernel type."""
        has = np.array([classify_hta_kernel(name) == kernel_type for name in self.names] + [False])
        return self.take(has[self.name])


_COLUMNS = (
    "ts",
    "duration",
    "name",
    "category",
    "stream",
    "correlation",
    "has_correlation",
    "launch_ts",
    "row",
)


def sort_as_hta(values: Ints) -> Ints:
    """Sort as HTA does: by numpy's default, which leaves equal values in any order.

    Rounding makes equal starts and negative lengths, and then the order shows: for one trace HTA
    itself printed 15943 µs of idle time with numpy held to AVX2, 15942 µs with AVX-512 or neither.
    A stable sort was tried: on one trace it lies 2 µs from what HTA printed.
    """
    order: Ints = np.argsort(values)
    return order


def classify_hta_kernel(name: str) -> str:
    """HTA's sort of a kernel, by its name alone."""
    if _COMMUNICATION.match(name):
        return COMMUNICATION
    if _MEMORY.match(name):
        return MEMORY
    return OTHER if _NOT_COMPUTATION.match(name) else COMPUTATION


def build_frames(timeline: Timeline) -> tuple[HtaFrame, ...]:
    """Every rank's events; steps are counted over all ranks, as HTA does."""
    check_arguments(timeline)
    parts = [(part.ranks[0], build_hta_rows(part)) for part in timeline.split_by_rank()]
    steps = {name for _, rows in parts for name in rows.names if "ProfilerStep" in name}
    return tuple(_frame(rank, rows, steps) for rank, rows in parts)


def _frame(rank: int, rows: HtaTraceRows, steps: set[str]) -> HtaFrame:
    order, kept = _kept(rows, steps)
    # An unknown other end counts as event number 0, which is the first of the file.
    launch = np.maximum(rows.correlated_row - 1, 0)
    launched = (rows.correlated_row >= 0) & kept[launch] if rows.ts.size else kept
    launch_ts = np.where(launched, rows.ts[launch], -1) if rows.ts.size else rows.ts
    return HtaFrame(
        rank=rank,
        ts=rows.ts[order],
        duration=rows.duration[order],
        name=rows.name[order],
        names=rows.names,
        category=rows.category[order],
        categories=rows.categories,
        stream=rows.stream[order],
        correlation=rows.correlation[order],
        has_correlation=(rows.correlated_row > 0)[order],
        launch_ts=launch_ts[order],
        row=order,
    )


def _kept(rows: HtaTraceRows, steps: set[str]) -> tuple[Ints, Flags]:
    """The rows HTA goes on with, in its order, and which they are.

    With two steps or more: what the host started before the latest mark of a step, and the
    device's events once for each of those that share their correlation.
    """
    everything = np.ones(rows.ts.size, dtype=np.bool_)
    if len(steps) < 2 or not rows.ts.size:
        return np.arange(rows.ts.size), everything
    device = mask_device_rows(rows)
    marks = rows.ts[~device & rows.match_names(*steps)]
    host = ~device & (rows.ts < (marks.max() if marks.size else -1))
    host_ids = np.sort(rows.correlation[host])
    ours = np.flatnonzero(device)
    times = np.searchsorted(host_ids, rows.correlation[ours], side="right")
    times = times - np.searchsorted(host_ids, rows.correlation[ours], side="left")
    order = np.concatenate([np.repeat(ours, times), np.flatnonzero(host)])
    kept = np.zeros(rows.ts.size, dtype=np.bool_)
    kept[order] = True
    return order, kept
