"""What exists: the work described once, as plain values that every wing takes.

    Model × Cluster × Layout × Workload = Work

The names load on first use; `catalog` has the real models, GPUs and clusters.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.spec import catalog
    from meshwright.spec.cluster import Cluster, Gpu
    from meshwright.spec.file_formats import dump, load
    from meshwright.spec.job_spec import JobSpec, read_job_spec
    from meshwright.spec.layout import Layout
    from meshwright.spec.model import Model, count_flops, count_parameters
    from meshwright.spec.serialization import decode
    from meshwright.spec.workload import LoRASpec, ServingWorkload, TrainingWorkload, Workload

_MODULES = {
    "LoRASpec": "meshwright.spec.workload",
    "Cluster": "meshwright.spec.cluster",
    "Gpu": "meshwright.spec.cluster",
    "Layout": "meshwright.spec.layout",
    "Model": "meshwright.spec.model",
    "ServingWorkload": "meshwright.spec.workload",
    "TrainingWorkload": "meshwright.spec.workload",
    "JobSpec": "meshwright.spec.job_spec",
    "Workload": "meshwright.spec.workload",
    "catalog": "meshwright.spec.catalog",
    "count_flops": "meshwright.spec.model",
    "count_parameters": "meshwright.spec.model",
    "dump": "meshwright.spec.file_formats",
    "load": "meshwright.spec.file_formats",
    "decode": "meshwright.spec.serialization",
    "read_job_spec": "meshwright.spec.job_spec",
}

__all__ = [
    "Cluster",
    "Gpu",
    "JobSpec",
    "Layout",
    "LoRASpec",
    "Model",
    "ServingWorkload",
    "TrainingWorkload",
    "Workload",
    "catalog",
    "count_flops",
    "count_parameters",
    "decode",
    "dump",
    "load",
    "read_job_spec",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
