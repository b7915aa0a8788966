"""Walks back from the end of a window to its beginning: what each moment waited for."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.collectives.collective_calls import COLLECTIVE_OPS
from meshwright.observe.analyze.collectives.matched_collectives import MatchedCollectives
from meshwright.observe.analyze.critical_path.dependency_graph import DependencyGraph, EdgeCause
from meshwright.observe.analyze.critical_path.device_dependencies import MAX_LAUNCH_NS
from meshwright.observe.analyze.critical_path.graph_builder import WindowGraph, build_window_graph
from meshwright.observe.analyze.critical_path.graph_timing import GraphTimes, compute_graph_times
from meshwright.observe.analyze.critical_path.host_operators import (
    HostOperators,
    find_host_operators,
)
from meshwright.observe.analyze.spans.intervals import Intervals
from meshwright.observe.analyze.spans.steps import find_steps
from meshwright.timeline.schema import SpanKind
from meshwright.timeline.timeline import Timeline, Window

HOST = "host"
LAUNCH = "launch delay"
KERNEL = "kernel"
COPY = "copy"
COMMUNICATION = "communication"
"""A collective of which one rank is known: waiting and transfer together."""
TRANSFER = "collective transfer"
UNEXPLAINED_WAIT = "unexplained wait"
"""Launched long ago and yet not begun: the stream waited for what the profile does not show."""
GAP = "kernel gap"
SYNC = "synchronization"
"""From the end of device work to the host's going on."""
MESSAGE = "message"
WAITING = "waiting for rank"
BEFORE = "before the window"

_LAGS = {
    EdgeCause.HOST: HOST,
    EdgeCause.LAUNCH: LAUNCH,
    EdgeCause.STREAM: GAP,
    EdgeCause.WAIT: GAP,
    EdgeCause.SYNC: SYNC,
    EdgeCause.TRANSFER: TRANSFER,
    EdgeCause.MESSAGE: MESSAGE,
    EdgeCause.RANK_BARRIER: GAP,
}
_WORK = {
    SpanKind.COMPUTE.value: KERNEL,
    SpanKind.MEMORY_COPY.value: COPY,
    SpanKind.COMMUNICATION.value: COMMUNICATION,
}


class PathSegment(NamedTuple):
    """A stretch of the critical path."""

    rank: int
    start_ns: int
    end_ns: int
    cause: str
    """`host`, `launch delay`, `kernel`, `copy`, `communication`, `collective transfer`, `kernel
    gap`, `unexplained wait`, `synchronization`, `message`, `waiting for rank R`, `before the
    window`."""
    name: str
    """The operator, kernel or collective; of a gap, what came after it."""


class CriticalPath(NamedTuple):
    """The path from a window's beginning to its end."""

    window_ns: Window
    """From the first beginning to the end of the path."""
    segments: tuple[PathSegment, ...]
    """In the order of time; together they are as long as the window."""
    ns_by_cause: dict[str, int]
    """Most first."""
    ns_by_name: dict[tuple[str, str], int]
    """By cause and name, most first; the host's time by the operators that ran."""
    ns_by_rank: dict[int, int]
    graph: WindowGraph
    """The graph, for `evaluate_changes`."""

    @property
    def total_ns(self) -> int:
        """How long the path is."""
        return self.window_ns[1] - self.window_ns[0]


def find_critical_path(
    timeline: Timeline,
    *,
    step: int | None = None,
    window_ns: Window | None = None,
    rank: int | None = None,
    collectives: MatchedCollectives | None = None,
) -> CriticalPath:
    """Return the critical path of a step, of a window, or of everything.

    Over all ranks it goes where the delay came from; with `rank` it stays on that rank and shows
    what came from others as waiting. Clocks must agree: see `clocks`.
    """
    windows = _windows(timeline, step, window_ns)
    if rank is not None and rank not in windows:
        fix = f"name one of {', '.join(map(str, sorted(windows)))}"
        raise InputError([Problem("rank", f"rank {rank} has no work in the window", fix)])
    built = build_window_graph(timeline, windows, collectives)
    return trace_critical_path(built, rank=rank)


def trace_critical_path(built: WindowGraph, *, rank: int | None = None) -> CriticalPath:
    """Return the critical path of a graph that was built."""
    graph = built.graph
    result = compute_graph_times(graph)
    last = result.last_node if rank is None else _last_of(graph, result, rank)
    began_on = int(graph.rank[find_path_origin(graph, result, last)]) if rank is None else rank
    begin = built.windows[began_on][0]
    walked = _walk(built, result, last, rank)
    raw = [one for one in reversed(walked) if one.end_ns > one.start_ns]
    if raw and raw[0].start_ns > begin:
        first = raw[0]
        raw.insert(0, PathSegment(first.rank, begin, first.start_ns, BEFORE, ""))
    named, by_name = _named(built, raw)
    by_cause: dict[str, int] = defaultdict(int)
    by_rank: dict[int, int] = defaultdict(int)
    for one in named:
        by_cause[one.cause] += one.end_ns - one.start_ns
        by_rank[one.rank] += one.end_ns - one.start_ns
    start = min(begin, named[0].start_ns) if named else begin
    return CriticalPath(
        (start, int(result.end[last])),
        tuple(named),
        dict(sorted(by_cause.items(), key=lambda item: -item[1])),
        dict(sorted(by_name.items(), key=lambda item: -item[1])),
        dict(sorted(by_rank.items())),
        built,
    )


def _windows(timeline: Timeline, step: int | None, window_ns: Window | None) -> dict[int, Window]:
    if step is None:
        whole = timeline.extent_ns if window_ns is None else window_ns
        # A rank may have counters alone.
        found = dict.fromkeys(np.unique(timeline.column("rank")).tolist(), whole)
    else:
        found = {
            one.rank: (own.start_ns, own.end_ns)
            for one in find_steps(timeline)
            for own in one.steps
            if own.number == step
        }
    if not found:
        fault = "there is nothing in the timeline" if step is None else f"there is no step {step}"
        raise InputError([Problem("step", fault, "name a step of the timeline, or a window")])
    return found


def find_path_origin(graph: DependencyGraph, result: GraphTimes, node: int) -> int:
    """Return the node at which the path to a node begins."""
    while result.critical_edge[node] >= 0:
        node = int(graph.source[result.critical_edge[node]])
    return node


def _last_of(graph: DependencyGraph, result: GraphTimes, rank: int) -> int:
    own = np.flatnonzero(graph.rank == rank)
    return int(own[np.argmax(result.end[own])])


def _walk(built: WindowGraph, result: GraphTimes, node: int, stay: int | None) -> list[PathSegment]:
    """From a node back to one that waited for nothing."""
    graph, found = built.graph, []
    texts = _NodeLabels(built)
    start, end = result.start.tolist(), result.end.tolist()
    decided = result.critical_edge.tolist()
    source, causes = graph.source.tolist(), graph.cause.tolist()
    rank = graph.rank.tolist()
    while True:
        if end[node] > start[node]:
            found.append(PathSegment(rank[node], start[node], end[node], *texts.work(node)))
        edge = decided[node]
        if edge < 0:
            break
        before, cause = source[edge], EdgeCause(causes[edge])
        if cause is not EdgeCause.MEMBER:
            about = _lag_cause(cause, start[node] - end[before]), texts.lag(node, cause)
            found.append(PathSegment(rank[node], end[before], start[node], *about))
        elif stay is not None:
            # On one rank: what it spent until the last member came is waiting.
            mine = _member(graph, node, stay)
            text = f"{WAITING} {rank[before]}"
            found.append(PathSegment(stay, start[mine], start[node], text, texts.call(node)))
            before = mine
        if stay is not None and cause is EdgeCause.MESSAGE and rank[before] != stay:
            mine = _before(graph, result, stay, start[node])
            if mine < 0:
                break
            found[-1] = PathSegment(
                stay, end[mine], start[node], f"{WAITING} {rank[before]}", texts.lag(node, cause)
            )
            before = mine
        node = before
    return found


def _lag_cause(cause: EdgeCause, lag_ns: int) -> str:
    return (
        UNEXPLAINED_WAIT if cause is EdgeCause.LAUNCH and lag_ns > MAX_LAUNCH_NS else _LAGS[cause]
    )


def _member(graph: DependencyGraph, arrival: int, rank: int) -> int:
    first, last = np.searchsorted(graph.target, [arrival, arrival + 1])
    members = graph.source[first:last]
    own = members[graph.rank[members] == rank]
    return int(own[0])


def _before(graph: DependencyGraph, result: GraphTimes, rank: int, moment: int) -> int:
    own = np.flatnonzero((graph.rank == rank) & (result.end < moment))
    return int(own[np.argmax(result.end[own])]) if own.size else -1


class _NodeLabels:
    """Names of what nodes stand for."""

    def __init__(self, built: WindowGraph) -> None:
        self._graph, self._calls = built.graph, built.collectives.calls
        self._names = {
            rank: part.string_column("name") for rank, part in built.rank_timelines.items()
        }
        self._kinds = {
            rank: part.string_column("kind") for rank, part in built.rank_timelines.items()
        }

    def work(self, node: int) -> tuple[str, str]:
        rank, row = int(self._graph.rank[node]), int(self._graph.row[node])
        kinds = self._kinds[rank]
        return _WORK[kinds.values[kinds.codes[row]]], self._name(rank, row)

    def lag(self, node: int, cause: EdgeCause) -> str:
        if cause is EdgeCause.TRANSFER:
            return self.call(node)
        rank, row = int(self._graph.rank[node]), int(self._graph.row[node])
        return self._name(rank, row) if row >= 0 else ""

    def call(self, node: int) -> str:
        call = int(self._graph.call[node])
        return COLLECTIVE_OPS[int(self._calls.op[call])] if call >= 0 else "all ranks"

    def _name(self, rank: int, row: int) -> str:
        names = self._names[rank]
        return str(names.values[names.codes[row]])


def _named(
    built: WindowGraph, raw: list[PathSegment]
) -> tuple[list[PathSegment], dict[tuple[str, str], int]]:
    """Give host segments the operators that ran, and sum up by name."""
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for one in raw:
        if one.cause != HOST:
            totals[one.cause, one.name] += one.end_ns - one.start_ns
    operators: Mapping[int, HostOperators] = {}
    for rank in {one.rank for one in raw if one.cause == HOST}:
        own = [one for one in raw if one.cause == HOST and one.rank == rank]
        start = np.array([one.start_ns for one in own], dtype=np.int64)
        end = np.array([one.end_ns for one in own], dtype=np.int64)
        ran = find_host_operators(built.rank_timelines[rank], (int(start[0]), int(end[-1])))
        for name, spent in ran.sum_time_by_operator(Intervals(start, end)).items():
            totals[HOST, name] += spent
        operators = {**operators, rank: ran}
    named = [
        one._replace(name=operators[one.rank].find_at(one.end_ns - 1)) if one.cause == HOST else one
        for one in raw
    ]
    return named, totals
