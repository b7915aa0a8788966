"""The dependency graph of a window: what had to be over before what could start.

A node is a moment on a rank: a point of the host, the start of device work, the arrival or the end
of a collective. It ends `length` after its time. An edge says that its target cannot start before
its source has ended, and `lag` later. Lags are chosen so that the graph, timed again without any
change, gives the times that were observed.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.intervals import Flags, Ints


class NodeKind(IntEnum):
    """What a node stands for; nodes of one moment are timed in this order."""

    BEFORE = 0
    """Work from before the window; does not move."""
    COLLECTIVE_END = 1
    HOST = 2
    """The host launches or begins or ends a wait."""
    DEVICE_WORK = 3
    """A kernel or copy; its length is the work's."""
    COLLECTIVE_START = 4
    ARRIVAL = 5
    """All members of a collective are there."""


class EdgeCause(IntEnum):
    """Why a target waits for its source, and what the lag is spent on."""

    HOST = 0
    """The host computes, or calls the runtime."""
    LAUNCH = 1
    """From the launch to the start on an idle stream."""
    STREAM = 2
    """Behind the work before it on the same stream."""
    WAIT = 3
    """Behind work of another stream."""
    SYNC = 4
    """The host waits for the device."""
    TRANSFER = 5
    """A collective moves its data."""
    MEMBER = 6
    """A collective waits for its members."""
    MESSAGE = 7
    """A receive waits for its send."""
    RANK_BARRIER = 8
    """All ranks are ready to go on."""


class DependencyGraph(NamedTuple):
    """Nodes in an order in which every source comes before its targets."""

    kind: Ints
    rank: Ints
    row: Ints
    """Row in the rank's timeline; -1 where there is none."""
    time_ns: Ints
    """When it was observed, ns."""
    duration_ns: Ints
    source: Ints
    """Edges, by target."""
    target: Ints
    lag_ns: Ints
    cause: Ints
    call: Ints
    """Place in the matched collectives for nodes of collectives; -1 for others."""
    num_dropped_edges: int
    """Edges against the order of time, which were left out."""

    @property
    def end_ns(self) -> Ints:
        """When each node was over, as observed."""
        return self.time_ns + self.duration_ns


class DependencyGraphBuilder:
    """Collects nodes and edges; numbers of nodes are in the order of adding."""

    def __init__(self) -> None:
        self._nodes: list[tuple[Ints, ...]] = []
        self._edges: list[tuple[Ints, ...]] = []
        self.size = 0

    def add_nodes(
        self,
        kind: NodeKind,
        rank: int,
        time: Ints,
        *,
        length: Ints | None = None,
        row: Ints | None = None,
        call: Ints | None = None,
    ) -> Ints:
        """Add nodes of one kind and rank; returns their numbers."""
        size = time.size
        absent = np.full(size, -1, dtype=np.int64)
        self._nodes.append(
            (
                np.full(size, int(kind)),
                np.full(size, rank),
                absent if row is None else row,
                time,
                np.zeros(size, dtype=np.int64) if length is None else length,
                absent if call is None else call,
            )
        )
        numbers = np.arange(self.size, self.size + size)
        self.size += size
        return numbers

    def add_edges(self, source: Ints, target: Ints, lag: Ints, cause: EdgeCause) -> None:
        """Add edges of one cause."""
        self._edges.append((source, target, lag, np.full(source.size, int(cause))))

    def build(self) -> DependencyGraph:
        """Sort everything by time; edges that point backwards are dropped."""
        empty = np.zeros(0, dtype=np.int64)
        kind, rank, row, time, length, call = (
            np.concatenate([empty, *column]) for column in zip(*self._nodes, strict=True)
        )
        order = np.lexsort((np.arange(time.size), kind, time))
        place = np.empty(order.size, dtype=np.int64)
        place[order] = np.arange(order.size)
        edges = [np.concatenate([empty, *column]) for column in zip(*self._edges, strict=True)]
        if not edges:
            edges = [empty] * 4
        source, target = place[edges[0]], place[edges[1]]
        forward: Flags = source < target
        by_target = np.flatnonzero(forward)[np.argsort(target[forward], kind="stable")]
        return DependencyGraph(
            kind[order],
            rank[order],
            row[order],
            time[order],
            length[order],
            source[by_target],
            target[by_target],
            edges[2][by_target],
            edges[3][by_target],
            call[order],
            int((~forward).sum()),
        )
