"""Which operator the host was in at each moment: the innermost span of the threads that launch."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.intervals import (
    Intervals,
    Ints,
    match_values,
    measure_covered_ns,
)
from meshwright.timeline.timeline import Timeline, Window

NO_OPERATOR = "(no operator)"
_LEFT_OUT = frozenset({"cuda_sync", "overhead", "Trace", "gpu_user_annotation"})


class HostOperators(NamedTuple):
    """Pieces of time, each with the operator that ran; they follow each other without gaps."""

    start: Ints
    end: Ints
    name: Ints
    names: tuple[str, ...]

    def find_at(self, moment: int) -> str:
        """The operator at a moment."""
        place = int(np.searchsorted(self.start, moment, side="right")) - 1
        return self.names[self.name[place]] if 0 <= place < self.name.size else NO_OPERATOR

    def sum_time_by_operator(self, intervals: Intervals) -> dict[str, int]:
        """How long each operator ran within these intervals, ns."""
        inside = measure_covered_ns(intervals, self.start, self.end)
        total = np.bincount(self.name, inside, minlength=len(self.names))
        return {
            name: int(spent)
            for name, spent in zip(self.names, total.tolist(), strict=True)
            if spent
        }


def find_host_operators(part: Timeline, window_ns: Window) -> HostOperators:
    """Find the innermost span of the host at every moment of a window.

    Of several open spans the one that began last counts; threads that launch nothing are left out.
    """
    start, duration = part.column("start_ns"), part.column("duration_ns")
    lane, process = part.string_column("lane"), part.string_column("process")
    names = part.string_column("name")
    host = match_values(process, lambda value: value.startswith("host"))
    host &= ~match_values(part.string_column("category"), lambda value: value in _LEFT_OUT)
    launching = np.unique(lane.codes[host & (part.column("flow_out") >= 0)])
    if launching.size:
        host &= np.isin(lane.codes, launching)
    end = start + duration
    rows = np.flatnonzero(host & (start < window_ns[1]) & (end > window_ns[0]) & (duration > 0))
    rows = rows[np.lexsort((-duration[rows], start[rows]))]
    return _innermost(start[rows], end[rows], names.codes[rows], tuple(names.values), window_ns)


def _innermost(
    start: Ints, end: Ints, name: Ints, names: tuple[str, ...], window_ns: Window
) -> HostOperators:
    """Sweep over beginnings and ends with a stack; one pass in plain Python."""
    size = start.size
    moments = np.concatenate([start, end])
    opens = np.repeat([True, False], size)
    order = np.lexsort((np.arange(2 * size), opens, moments))
    stack: list[int] = []
    closed = [False] * size
    times, inner = [window_ns[0]], [-1]
    clipped = np.clip(moments, *window_ns).tolist()
    for event in order.tolist():
        if event < size:
            stack.append(event)
        else:
            closed[event - size] = True
            while stack and closed[stack[-1]]:
                stack.pop()
        times.append(clipped[event])
        inner.append(stack[-1] if stack else -1)
    begin = np.array(times, dtype=np.int64)
    stop = np.append(begin[1:], window_ns[1])
    which = np.array(inner)
    code = np.where(which >= 0, name[np.maximum(which, 0)] if size else 0, len(names))
    keep = stop > begin
    return HostOperators(begin[keep], stop[keep], code[keep], (*names, NO_OPERATOR))
