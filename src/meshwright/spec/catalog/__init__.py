"""Real models, GPUs and clusters by name, each figure with its source."""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.spec.catalog.architectures import CatalogModel, get_model, list_models
    from meshwright.spec.catalog.hardware import (
        get_cluster,
        get_gpu,
        list_clusters,
        list_gpus,
        load_cluster,
        normalize_name,
        read_cluster,
    )

_MODELS, _HARDWARE = "meshwright.spec.catalog.architectures", "meshwright.spec.catalog.hardware"

_MODULES = {
    "CatalogModel": _MODELS,
    "get_cluster": _HARDWARE,
    "list_clusters": _HARDWARE,
    "get_gpu": _HARDWARE,
    "list_gpus": _HARDWARE,
    "load_cluster": _HARDWARE,
    "get_model": _MODELS,
    "list_models": _MODELS,
    "normalize_name": _HARDWARE,
    "read_cluster": _HARDWARE,
}

__all__ = [
    "CatalogModel",
    "get_cluster",
    "get_gpu",
    "get_model",
    "list_clusters",
    "list_gpus",
    "list_models",
    "load_cluster",
    "normalize_name",
    "read_cluster",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
