"""What explains: profiles read and analysed, runs held against their predictions.

It reads timelines, simulated and measured alike, and may use both worlds that write them. The
names below take a path or a `Timeline`; rows they return have a `frame()` for pandas.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.observe.finding import Finding
    from meshwright.observe.notebook import (
        Rows,
        breakdown,
        collectives,
        critical_path,
        diff,
        find,
        idle,
        kernels,
        launches,
        mfu,
        overlap,
        read,
        roofline,
        steps,
        stragglers,
    )
    from meshwright.observe.runs import Overview, overview

_NOTEBOOK = "meshwright.observe.notebook"
_HOMES = {
    "Finding": "meshwright.observe.finding",
    "Overview": "meshwright.observe.runs",
    "Rows": _NOTEBOOK,
    "breakdown": _NOTEBOOK,
    "collectives": _NOTEBOOK,
    "critical_path": _NOTEBOOK,
    "diff": _NOTEBOOK,
    "find": _NOTEBOOK,
    "idle": _NOTEBOOK,
    "kernels": _NOTEBOOK,
    "launches": _NOTEBOOK,
    "mfu": _NOTEBOOK,
    "overlap": _NOTEBOOK,
    "overview": "meshwright.observe.runs",
    "read": _NOTEBOOK,
    "roofline": _NOTEBOOK,
    "steps": _NOTEBOOK,
    "stragglers": _NOTEBOOK,
}

__all__ = [
    "Finding",
    "Overview",
    "Rows",
    "breakdown",
    "collectives",
    "critical_path",
    "diff",
    "find",
    "idle",
    "kernels",
    "launches",
    "mfu",
    "overlap",
    "overview",
    "read",
    "roofline",
    "steps",
    "stragglers",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
