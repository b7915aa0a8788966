"""Times a dependency graph again: what would have happened had some things taken less."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.critical_path.dependency_graph import DependencyGraph
from meshwright.observe.analyze.spans.intervals import Ints


class GraphTimes(NamedTuple):
    """When every node would have started and ended."""

    start: Ints
    end: Ints
    critical_edge: Ints
    """The edge that decided each start; -1 where nothing did."""

    @property
    def last_node(self) -> int:
        """The node that ended last."""
        return int(np.argmax(self.end))


def compute_graph_times(
    graph: DependencyGraph, length: Ints | None = None, lag: Ints | None = None
) -> GraphTimes:
    """Start every node as soon as all it waits for allows.

    One pass over the edges in plain Python: each start needs those before it. What waits for
    nothing keeps its time.
    """
    lengths = (graph.duration_ns if length is None else length).tolist()
    lags = (graph.lag_ns if lag is None else lag).tolist()
    sources = graph.source.tolist()
    first = np.searchsorted(graph.target, np.arange(graph.time_ns.size + 1)).tolist()
    start, end, decided = (
        graph.time_ns.tolist(),
        [0] * graph.time_ns.size,
        [-1] * graph.time_ns.size,
    )
    for node in range(graph.time_ns.size):
        begin, close = first[node], first[node + 1]
        if begin < close:
            best, edge = end[sources[begin]] + lags[begin], begin
            for other in range(begin + 1, close):
                reach = end[sources[other]] + lags[other]
                if reach >= best:
                    best, edge = reach, other
            start[node], decided[node] = best, edge
        end[node] = start[node] + lengths[node]
    return GraphTimes(np.array(start), np.array(end), np.array(decided))
