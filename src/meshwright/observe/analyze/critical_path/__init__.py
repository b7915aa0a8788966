"""The critical path of a window through hosts, launches, streams and ranks; what would shorten it.

critical_path   the segments that the window's end waited for, with causes, and totals
what_if         the window's length with some things faster, from the graph timed again
suggestions     the changes worth asking about
"""

from meshwright.observe.analyze.critical_path.building import Built, build
from meshwright.observe.analyze.critical_path.path import CriticalPath, Segment, critical_path
from meshwright.observe.analyze.critical_path.whatif import Change, Gain, suggestions, what_if

__all__ = [
    "Built",
    "Change",
    "CriticalPath",
    "Gain",
    "Segment",
    "build",
    "critical_path",
    "suggestions",
    "what_if",
]
