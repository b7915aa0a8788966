"""What exists: the work described once, as plain values that every wing takes.

    Model × Cluster × Layout × Workload = Work

The names load on first use; `catalog` has the real models, GPUs and clusters.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.spec import catalog
    from meshwright.spec.cluster import Cluster, Gpu
    from meshwright.spec.files import dump, load
    from meshwright.spec.layout import Layout
    from meshwright.spec.model import Model, count_flops, count_parameters
    from meshwright.spec.read import read
    from meshwright.spec.work import Work, read_work
    from meshwright.spec.workload import Adapter, Requests, Training, Workload

_HOMES = {
    "Adapter": "meshwright.spec.workload",
    "Cluster": "meshwright.spec.cluster",
    "Gpu": "meshwright.spec.cluster",
    "Layout": "meshwright.spec.layout",
    "Model": "meshwright.spec.model",
    "Requests": "meshwright.spec.workload",
    "Training": "meshwright.spec.workload",
    "Work": "meshwright.spec.work",
    "Workload": "meshwright.spec.workload",
    "catalog": "meshwright.spec.catalog",
    "count_flops": "meshwright.spec.model",
    "count_parameters": "meshwright.spec.model",
    "dump": "meshwright.spec.files",
    "load": "meshwright.spec.files",
    "read": "meshwright.spec.read",
    "read_work": "meshwright.spec.work",
}

__all__ = [
    "Adapter",
    "Cluster",
    "Gpu",
    "Layout",
    "Model",
    "Requests",
    "Training",
    "Work",
    "Workload",
    "catalog",
    "count_flops",
    "count_parameters",
    "dump",
    "load",
    "read",
    "read_work",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
