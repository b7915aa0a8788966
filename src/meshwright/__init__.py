"""Meshwright plans, predicts, runs and explains large-model training and inference.

The names below load on first use, so that importing the package costs next to nothing.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.errors import InputError, MeshwrightError, Problem
    from meshwright.predict import predict_memory
    from meshwright.spec import Cluster, Layout, Model, Work, Workload, catalog
    from meshwright.timeline import Timeline

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "meshwright.spec",
    "InputError": "meshwright.errors",
    "Layout": "meshwright.spec",
    "MeshwrightError": "meshwright.errors",
    "Model": "meshwright.spec",
    "Problem": "meshwright.errors",
    "Timeline": "meshwright.timeline",
    "Work": "meshwright.spec",
    "Workload": "meshwright.spec",
    "catalog": "meshwright.spec.catalog",
    "predict_memory": "meshwright.predict",
}

__all__ = [
    "Cluster",
    "InputError",
    "Layout",
    "MeshwrightError",
    "Model",
    "Problem",
    "Timeline",
    "Work",
    "Workload",
    "catalog",
    "predict_memory",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
