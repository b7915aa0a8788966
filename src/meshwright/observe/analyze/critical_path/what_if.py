"""What a window's length would be with some things faster: the graph timed again.

Not a subtraction: where the path moves to something else, the gain ends. The order of work on each
stream stays as it was; what a change would let the program do differently is not foreseen.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.collectives.collective_calls import COLLECTIVE_OPS, op_of
from meshwright.observe.analyze.critical_path.critical_path import (
    GAP,
    HOST,
    KERNEL,
    LAUNCH,
    TRANSFER,
    CriticalPath,
    find_path_origin,
)
from meshwright.observe.analyze.critical_path.dependency_graph import EdgeCause, NodeKind
from meshwright.observe.analyze.critical_path.graph_builder import WindowGraph
from meshwright.observe.analyze.critical_path.graph_timing import GraphTimes, compute_graph_times
from meshwright.observe.analyze.spans.intervals import Flags
from meshwright.timeline.schema import SpanKind

ChangeTarget = Literal["kernel", "collective", "host", "launch", "gap", "rank", "arrival"]


class CriticalPathChange(NamedTuple):
    """Something that takes less, or more, time."""

    target: ChangeTarget
    """A kernel by name, a collective by kind (or `all`), the host, delays of launches, gaps between
    kernels, all kernels of one rank; `arrival`: a rank is never later than the others."""
    name: str = ""
    """Which kernel, collective or rank; nothing for the others."""
    factor: float = 0.0
    """How long it takes of what it took: 0 is free, 0.5 twice as fast."""

    @property
    def label(self) -> str:
        """The change in words."""
        thing = {"launch": "launch delay", "gap": "gaps between kernels"}.get(
            self.target, self.target
        )
        subject = f"{thing} {self.name}".strip() if self.target != "collective" else self.name
        if subject == "all":
            subject = "all collectives"
        if self.target == "arrival":
            return f"if rank {self.name} never came late"
        if self.factor == 0:
            return f"if {subject} were free"
        return f"if {subject} were {1 / self.factor:.3g}× faster"


class CriticalPathGain(NamedTuple):
    """What a change would give."""

    change: CriticalPathChange
    before_ns: int
    """How long the window's own work takes: from its beginning, or from the end of earlier work
    that the device did first. No change of the window shortens that."""
    after_ns: int

    @property
    def speedup_share(self) -> float:
        """Part of the window that would be saved."""
        return 1 - self.after_ns / self.before_ns if self.before_ns else 0.0

    def __str__(self) -> str:
        return f"{self.change.label}: {-100 * self.speedup_share:+.1f} %"


def evaluate_changes(
    built: WindowGraph, changes: Iterable[CriticalPathChange]
) -> tuple[CriticalPathGain, ...]:
    """Return the window's length under each change alone."""
    base = compute_graph_times(built.graph)
    begin = _begin(built, base)
    before = int(base.end[base.last_node]) - begin
    gains = []
    for change in changes:
        result = _changed(built, change)
        if change.target != "arrival":
            gains.append(
                CriticalPathGain(change, before, int(result.end[result.last_node]) - begin)
            )
            continue
        # The late rank still ends when it does; what counts is when the others do.
        others = built.graph.rank != int(change.name)
        spans = [int(timing.end[others].max()) - begin for timing in (base, result)]
        gains.append(CriticalPathGain(change, spans[0], spans[1]))
    return tuple(gains)


def _begin(built: WindowGraph, base: GraphTimes) -> int:
    first = find_path_origin(built.graph, base, base.last_node)
    if built.graph.kind[first] == NodeKind.BEFORE:
        return int(base.end[first])
    return built.windows[int(built.graph.rank[first])][0]


def suggest_changes(path: CriticalPath, most: int = 5) -> tuple[CriticalPathChange, ...]:
    """The changes worth asking about: what the path spends most on, each kind of collective."""
    changes = []
    ops = np.unique(path.graph.collectives.calls.op)
    seen = {name for cause, name in path.ns_by_name if cause in (TRANSFER,)}
    seen |= {COLLECTIVE_OPS[op] for op in ops.tolist()} | _lone_ops(path)
    changes += [
        CriticalPathChange("collective", name, 0.0) for name in COLLECTIVE_OPS if name in seen
    ]
    kernels = [name for cause, name in path.ns_by_name if cause == KERNEL]
    changes += [CriticalPathChange("kernel", name, 0.5) for name in kernels[:most]]
    least = path.total_ns * 0.01
    others = {
        HOST: CriticalPathChange("host", factor=0.5),
        LAUNCH: CriticalPathChange("launch", factor=0.0),
        GAP: CriticalPathChange("gap", factor=0.0),
    }
    changes += [one for cause, one in others.items() if path.ns_by_cause.get(cause, 0) > least]
    return tuple(changes)


def _lone_ops(path: CriticalPath) -> set[str]:
    return {
        COLLECTIVE_OPS[op_of(name)]
        for cause, name in path.ns_by_name
        if cause == "communication" and op_of(name) >= 0
    }


def _changed(built: WindowGraph, change: CriticalPathChange) -> GraphTimes:
    graph = built.graph
    length, lag = graph.duration_ns.astype(np.float64), graph.lag_ns.astype(np.float64)
    if change.target == "kernel":
        length[_named(built, change.name)] *= change.factor
    elif change.target == "collective":
        length[_lone_collectives(built, change.name)] *= change.factor
        transfers = graph.cause == EdgeCause.TRANSFER
        if change.name != "all":
            calls = graph.call[graph.target]
            ops = np.append(built.collectives.calls.op, -1)
            transfers &= ops[calls] == _op(change.name)
        lag[transfers] *= change.factor
    elif change.target == "rank":
        length[_computing(built, _rank(built, change.name))] *= change.factor
    elif change.target == "arrival":
        return _without_lateness(built, _rank(built, change.name))
    else:
        causes = {
            "host": [EdgeCause.HOST],
            "launch": [EdgeCause.LAUNCH],
            "gap": [EdgeCause.STREAM, EdgeCause.WAIT],
        }
        lag[np.isin(graph.cause, causes[change.target])] *= change.factor
    return compute_graph_times(
        graph, np.rint(length).astype(np.int64), np.rint(lag).astype(np.int64)
    )


def _without_lateness(built: WindowGraph, rank: int) -> GraphTimes:
    """Time again with collectives that do not wait for one rank."""
    graph = built.graph
    own = (graph.cause == EdgeCause.MEMBER) & (graph.rank[graph.source] == rank)
    keep = ~own
    lonely = np.setdiff1d(graph.target[own], graph.target[keep])
    keep |= np.isin(graph.target, lonely)
    return compute_graph_times(
        graph._replace(
            source=graph.source[keep],
            target=graph.target[keep],
            lag_ns=graph.lag_ns[keep],
            cause=graph.cause[keep],
        )
    )


def _work(built: WindowGraph, test: Flags, rank: int) -> Flags:
    """Which nodes are work of a rank whose rows pass."""
    graph = built.graph
    chosen: Flags = (graph.rank == rank) & (graph.kind == NodeKind.DEVICE_WORK)
    chosen[chosen] = test[graph.row[chosen]]
    return chosen


def _computing(built: WindowGraph, rank: int) -> Flags:
    """Which nodes are kernels of a rank that compute."""
    kinds = built.rank_timelines[rank].string_column("kind")
    test = np.array([value == SpanKind.COMPUTE.value for value in kinds.values] + [False])
    return _work(built, test[kinds.codes], rank)


def _named(built: WindowGraph, name: str) -> Flags:
    """Which nodes are work of this name."""
    graph = built.graph
    found = np.zeros(graph.kind.size, dtype=np.bool_)
    known = False
    for rank, part in built.rank_timelines.items():
        names = part.string_column("name")
        if name in names.values:
            known = True
            test = names.codes == list(names.values).index(name)
            found |= _work(built, test, rank)
    if not known:
        raise InputError([Problem("name", f"no kernel is called {name!r}", "name one of the path")])
    return found


def _lone_collectives(built: WindowGraph, name: str) -> Flags:
    """Which nodes are collectives of which only one rank is known."""
    graph = built.graph
    wanted = None if name == "all" else _op(name)
    found = np.zeros(graph.kind.size, dtype=np.bool_)
    for rank, part in built.rank_timelines.items():
        names, kinds, collective = (part.string_column(c) for c in ("name", "kind", "collective"))
        is_comm = np.array(
            [value == SpanKind.COMMUNICATION.value for value in kinds.values] + [False]
        )
        by_name = np.array([op_of(value) for value in names.values] + [-1])
        by_word = np.array([op_of(value) for value in collective.values] + [-1])
        op = np.where(collective.codes >= 0, by_word[collective.codes], by_name[names.codes])
        test = is_comm[kinds.codes] & (wanted is None or op == wanted)
        found |= _work(built, test, rank)
    return found


def _op(name: str) -> int:
    if name not in COLLECTIVE_OPS:
        fix = f"name one of {', '.join(COLLECTIVE_OPS)}, or all"
        raise InputError([Problem("collective", f"there is no collective {name!r}", fix)])
    return COLLECTIVE_OPS.index(name)


def _rank(built: WindowGraph, name: str) -> int:
    if not name.isdigit() or int(name) not in built.rank_timelines:
        fix = f"name one of {', '.join(map(str, built.rank_timelines))}"
        raise InputError([Problem("rank", f"there is no rank {name!r}", fix)])
    return int(name)
