"""The critical path of one rank as Holistic Trace Analysis 0.5 prints it.

Rules restated from its documentation and from what it does: a start and an end node for every
operator, runtime call and kernel of one annotated window; host nodes in the order of each thread's
call stack; a kernel follows its launch where the queue was empty, else the kernel before it; `cuda_
sync` events tie streams and host. The longest path through the graph is the critical path. It
leaves out kernels of CUDA graphs but the last and knows one rank only; for right answers use
`observe.analyze.critical_path`.
"""

import re
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.hta.hta_sync_edges import (
    HtaSyncEdges,
    count_waiting_kernels,
    find_sync_edges,
)
from meshwright.observe.analyze.hta.hta_trace_rows import (
    HtaTraceRows,
    build_hta_rows,
    check_arguments,
    mask_retained_rows,
)
from meshwright.observe.analyze.spans.intervals import Flags, Ints
from meshwright.timeline.timeline import Timeline

OPERATOR = "critical_path_operator"
DEPENDENCY = "critical_path_dependency"
LAUNCH = "critical_path_kernel_launch_delay"
BETWEEN = "critical_path_kernel_kernel_delay"
SYNC = "critical_path_sync_dependency"

BLOCKING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpyAsync",
)
"""Calls whose own time does not count, as they may wait for the device."""
_NESTED = re.compile(r"<[^<>]*>|\([^()]*\)")
_MEMORY = re.compile(r"(^Memcpy)|(^Memset)|(^dma)")


class HtaCriticalPath(NamedTuple):
    """What `critical_path_analysis` and its breakdown say."""

    num_nodes: int
    num_edges: int
    num_path_nodes: int
    us_by_type: dict[str, float]
    us_by_bound: dict[str, float]


class _Graph:
    """Nodes 2·row (start) and 2·row + 1 (end); edges in the order they were added."""

    def __init__(self, rows: HtaTraceRows) -> None:
        self.time = np.empty(2 * rows.ts.size, dtype=np.int64)
        self.time[0::2], self.time[1::2] = rows.ts, rows.ts + rows.duration
        self.edges: dict[tuple[int, int], tuple[str, int]] = {}
        self.before: dict[int, dict[int, int]] = {}
        self.after: dict[int, list[int]] = defaultdict(list)

    def add(self, source: int, target: int, kind: str, *, free: bool = False) -> None:
        """Add an edge; the same two nodes again replace its kind and weight."""
        weight = 0
        if not free and kind not in (DEPENDENCY, SYNC):
            weight = int(self.time[target] - self.time[source])
        if (source, target) not in self.edges:
            self.after[source].append(target)
        self.edges[source, target] = (kind, weight)
        # Negative weights come of rounding; the path counts them as nothing.
        self.before.setdefault(source, {})
        self.before.setdefault(target, {})[source] = max(weight, 0)


def find_hta_critical_path(
    part: Timeline, *, annotation: str = "ProfilerStep", instance: int = 0
) -> HtaCriticalPath:
    """Return the critical path of one instance of an annotation on one rank."""
    check_arguments(part)
    whole = build_hta_rows(part)
    keep = mask_retained_rows(whole)
    window = _window(whole, keep, annotation, instance)
    inside = _clipped(whole, keep, window)
    has_nodes = inside & (
        whole.match_categories("cpu_op", "cuda_runtime", "cuda_driver")
        | ((whole.stream != -1) & (whole.correlated_row >= 0))
    )
    graph = _Graph(whole)
    _add_host(graph, whole, inside, has_nodes)
    _StreamChainer(graph, whole, keep, has_nodes).add(inside)
    path = _longest(graph)
    by_type: dict[str, float] = defaultdict(float)
    by_bound: dict[str, float] = defaultdict(float)
    for source, target in pairwise(path):
        kind, weight = graph.edges[source, target]
        by_type[kind] += weight
        by_bound[_bound(whole, kind, source)] += weight
    return HtaCriticalPath(
        len(graph.before),
        len(graph.edges),
        len(path),
        dict(sorted(by_type.items())),
        dict(sorted(by_bound.items())),
    )


def _window(rows: HtaTraceRows, keep: Flags, annotation: str, instance: int) -> tuple[int, int]:
    names = [name for name in rows.names if annotation in name]
    found = np.flatnonzero(keep & rows.match_names(*names))
    # Device rows stand first in its table, then the host's; both in the order of the file.
    if not 0 <= instance < found.size:
        fault = f"there is no instance {instance} of {annotation!r}; there are {found.size}"
        raise InputError([Problem("annotation", fault, "name an annotation of the trace")])
    row = int(found[instance])
    return int(rows.ts[row]), int(rows.ts[row] + rows.duration[row])


def _clipped(rows: HtaTraceRows, keep: Flags, window: tuple[int, int]) -> Flags:
    """Which rows start in the window, kernels by their launch."""
    inside: Flags = keep & (rows.ts >= window[0]) & (rows.ts <= window[1]) & (rows.duration > 0)
    host = keep & (rows.stream == -1)
    # A kernel joins through the launch that names it: of a graph launch, the last kernel alone.
    launches = np.flatnonzero(host & inside & (rows.correlated_row > 0))
    launched = np.zeros(rows.ts.size, dtype=np.bool_)
    launched[rows.correlated_row[launches] - 1] = True
    device = keep & (rows.stream != -1) & (launched | rows.match_names("Stream Wait Event"))
    both: Flags = (inside & host) | device
    return both


def _add_host(graph: _Graph, rows: HtaTraceRows, inside: Flags, has_nodes: Flags) -> None:
    """Chain the nodes of every thread in the order of its call stack."""
    blocking = rows.match_names(*BLOCKING)
    place = rows.process * (int(rows.thread.max(initial=0)) + 1) + rows.thread
    host = np.flatnonzero(inside & (rows.stream == -1))
    with_device = np.unique(place[inside & (rows.stream > 0)])
    host = host[~np.isin(place[host], with_device)]
    order = host[np.argsort(place[host], kind="stable")]
    cuts = np.flatnonzero(place[order][1:] != place[order][:-1]) + 1
    for thread in np.split(order, cuts):
        if thread.size:
            _add_thread(graph, rows, thread, has_nodes, blocking)


def _add_thread(
    graph: _Graph, rows: HtaTraceRows, thread: Ints, has_nodes: Flags, blocking: Flags
) -> None:
    size = thread.size
    start, length = rows.ts[thread], rows.duration[thread]
    moment = np.concatenate([start, start + length])
    ends = np.repeat([False, True], size)
    both = np.concatenate([length, length])
    number = np.concatenate([thread, thread])
    # Ends before starts; parents open before children and close behind them.
    order = np.lexsort(
        (np.where(ends, -number, number), np.where(ends, both, -both), ~ends, moment)
    )
    depth = 0
    last = top = -1
    stack: list[int] = []
    for event in order.tolist():
        if not ends[event]:
            row = int(number[event])
            stack.append(row)
            if not has_nodes[row]:
                continue
            if depth == 0 and top >= 0:
                graph.add(top, 2 * row, DEPENDENCY)
            depth += 1
            if last >= 0:
                graph.add(last, 2 * row, OPERATOR)
            last = 2 * row
        elif stack:
            row = stack.pop()
            if not has_nodes[row]:
                continue
            depth -= 1
            if last >= 0:
                graph.add(last, 2 * row + 1, OPERATOR, free=bool(blocking[row]))
            last, top = (-1, 2 * row + 1) if depth == 0 else (2 * row + 1, top)


class _StreamChainer:
    """Chains kernels behind launches, kernels and what they synchronize with."""

    def __init__(self, graph: _Graph, rows: HtaTraceRows, keep: Flags, has_nodes: Flags) -> None:
        self._graph, self._rows, self._has_nodes = graph, rows, has_nodes
        self._syncs: HtaSyncEdges = find_sync_edges(rows, keep)
        self._queue = count_waiting_kernels(rows, keep)
        self._last: dict[int, int] = {}
        self._waits: dict[int, int] = {}

    def add(self, inside: Flags) -> None:
        """Add all kernels and synchronizations of a window."""
        rows = self._rows
        device = inside & (rows.correlated_row >= 0)
        device &= (rows.stream != -1) | rows.match_names("Event Sync", "Context Sync")
        is_sync = rows.match_categories("cuda_sync")
        chosen = np.flatnonzero(device)
        moment = np.where(is_sync, rows.ts + rows.duration, rows.ts)[chosen]
        for row in chosen[np.argsort(moment, kind="stable")].tolist():
            if is_sync[row]:
                self._add_sync(row)
            else:
                self._add_kernel(row, self._waits.pop(row, -1))

    def _add_sync(self, row: int) -> None:
        rows, graph = self._rows, self._graph
        name = rows.names[rows.name[row]]
        call = int(rows.correlated_row[row]) - 1
        if name in ("Stream Wait Event", "Event Sync"):
            launch = self._syncs.launch_before_record.get(int(rows.event_record[row]), -1)
            if launch < 0:
                return
            source = int(rows.correlated_row[launch]) - 1
            if name == "Event Sync":
                if source >= 0 and self._has_nodes[source]:
                    graph.add(2 * source + 1, 2 * call + 1, SYNC)
            elif (target := self._syncs.next_kernel.get(call, -1)) >= 0:
                self._waits[target] = source
            return
        one = [self._last.get(int(rows.stream[row]), -1)]
        for node in list(self._last.values()) if name == "Context Sync" else one:
            if node >= 0:
                graph.add(node, 2 * call + 1, SYNC)

    def _add_kernel(self, row: int, source: int) -> None:
        rows, graph = self._rows, self._graph
        start, stream = 2 * row, int(rows.stream[row])
        graph.add(start, start + 1, OPERATOR)
        tied = source >= 0 and bool(self._has_nodes[source])
        tied_end = int(graph.time[2 * source + 1]) if tied else 0
        if tied:
            graph.add(2 * source + 1, start, SYNC)
        launch = int(rows.correlated_row[row]) - 1
        launched = int(rows.ts[launch])
        before = self._last.get(stream, -1)
        if (
            self._queue[launch] == 1
            and self._queue[row] == 0
            and (before < 0 or graph.time[before] < launched)
            and (not tied or tied_end < launched)
        ):
            graph.add(2 * launch, start, LAUNCH)
        elif before >= 0 and (not tied or tied_end < graph.time[before]):
            graph.add(before, start, BETWEEN)
        self._last[stream] = start + 1


def _longest(graph: _Graph) -> list[int]:
    """The longest path, ties as networkx breaks them: generations of nodes, first edge wins."""
    missing = {node: len(before) for node, before in graph.before.items()}
    order = [node for node, count in missing.items() if not count]
    for node in order:
        for target in graph.after[node]:
            missing[target] -= 1
            if not missing[target]:
                order.append(target)
    if len(order) < len(missing):
        fix = "use the default critical path"
        raise InputError([Problem("trace", "its dependencies form a circle", fix)])
    if not order:
        raise InputError([Problem("window", "has no operator and no kernel", "name another step")])
    distance: dict[int, tuple[int, int]] = {}
    for node in order:
        best, through = 0, node
        first = True
        for source, weight in graph.before[node].items():
            reached = distance[source][0] + weight
            if first or reached > best:
                best, through, first = reached, source, False
        distance[node] = (best, through)
    node = max(distance, key=lambda one: distance[one][0])
    path = [node]
    while distance[node][1] != node:
        node = distance[node][1]
        path.append(node)
    return path[::-1]


def _bound(rows: HtaTraceRows, kind: str, source: int) -> str:
    if kind == BETWEEN:
        return "gpu_kernel_kernel_overhead"
    if kind == LAUNCH:
        return "gpu_kernel_launch_overhead"
    if kind in (DEPENDENCY, SYNC):
        return ""
    row = source // 2
    if rows.stream[row] < 0:
        return "cpu_bound"
    name = shorten_kernel_name(rows.names[rows.name[row]])
    return "gpu_communication_bound" if re.match(r"nccl.*Kernel", name) else "gpu_compute_bound"


def shorten_kernel_name(name: str) -> str:
    """Return a kernel's name without arguments and what it returns."""
    if _MEMORY.match(name) or ("<" not in name and "(" not in name):
        return name
    text, before = name.replace("->", ""), ""
    while text != before:
        before, text = text, _NESTED.sub("", text)
    return text.split(" ")[-1]
