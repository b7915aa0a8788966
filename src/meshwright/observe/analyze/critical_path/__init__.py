"""The critical path of a window through hosts, launches, streams and ranks; what would shorten it.

find_critical_path  the segments that the window's end waited for, with causes, and totals
evaluate_changes    the window's length with some things faster, from the graph timed again
suggest_changes     the changes worth asking about
"""

from meshwright.observe.analyze.critical_path.critical_path import (
    CriticalPath,
    PathSegment,
    find_critical_path,
)
from meshwright.observe.analyze.critical_path.graph_builder import WindowGraph, build_window_graph
from meshwright.observe.analyze.critical_path.what_if import (
    CriticalPathChange,
    CriticalPathGain,
    evaluate_changes,
    suggest_changes,
)

__all__ = [
    "CriticalPath",
    "CriticalPathChange",
    "CriticalPathGain",
    "PathSegment",
    "WindowGraph",
    "build_window_graph",
    "evaluate_changes",
    "find_critical_path",
    "suggest_changes",
]
