"""What explains: profiles read and analysed, runs held against their predictions.

It reads timelines, simulated and measured alike, and may use both worlds that write them. The
names below take a path or a `Timeline`; rows they return have a `to_frame()` for pandas.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.observe.finding import Finding
    from meshwright.observe.notebook import (
        ResultRows,
        breakdown,
        collectives,
        critical_path,
        diff,
        find_inefficiencies,
        idle,
        kernels,
        launches,
        load_trace,
        mfu,
        overlap,
        roofline,
        steps,
        stragglers,
    )
    from meshwright.observe.overview import RunOverview, analyze_run

_NOTEBOOK = "meshwright.observe.notebook"
_MODULES = {
    "Finding": "meshwright.observe.finding",
    "RunOverview": "meshwright.observe.overview",
    "ResultRows": _NOTEBOOK,
    "breakdown": _NOTEBOOK,
    "collectives": _NOTEBOOK,
    "critical_path": _NOTEBOOK,
    "diff": _NOTEBOOK,
    "find_inefficiencies": _NOTEBOOK,
    "idle": _NOTEBOOK,
    "kernels": _NOTEBOOK,
    "launches": _NOTEBOOK,
    "mfu": _NOTEBOOK,
    "overlap": _NOTEBOOK,
    "analyze_run": "meshwright.observe.overview",
    "load_trace": _NOTEBOOK,
    "roofline": _NOTEBOOK,
    "steps": _NOTEBOOK,
    "stragglers": _NOTEBOOK,
}

__all__ = [
    "Finding",
    "ResultRows",
    "RunOverview",
    "analyze_run",
    "breakdown",
    "collectives",
    "critical_path",
    "diff",
    "find_inefficiencies",
    "idle",
    "kernels",
    "launches",
    "load_trace",
    "mfu",
    "overlap",
    "roofline",
    "steps",
    "stragglers",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
