"""Meshwright plans, predicts, runs and explains large-model training and inference.

The names below load on first use, so that importing the package costs next to nothing.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.errors import InputError, MeshwrightError, Problem
    from meshwright.predict import predict_memory
    from meshwright.spec import Cluster, JobSpec, Layout, Model, Workload, catalog
    from meshwright.timeline import Timeline

__version__ = "0.2.0"

_MODULES = {
    "Cluster": "meshwright.spec",
    "InputError": "meshwright.errors",
    "Layout": "meshwright.spec",
    "MeshwrightError": "meshwright.errors",
    "Model": "meshwright.spec",
    "Problem": "meshwright.errors",
    "Timeline": "meshwright.timeline",
    "JobSpec": "meshwright.spec",
    "Workload": "meshwright.spec",
    "catalog": "meshwright.spec.catalog",
    "predict_memory": "meshwright.predict",
}

__all__ = [
    "Cluster",
    "InputError",
    "JobSpec",
    "Layout",
    "MeshwrightError",
    "Model",
    "Problem",
    "Timeline",
    "Workload",
    "catalog",
    "predict_memory",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
