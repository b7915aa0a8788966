"""Real models, GPUs and clusters by name, each figure with its source."""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.spec.catalog.architectures import CatalogModel, model, models
    from meshwright.spec.catalog.hardware import (
        cluster,
        clusters,
        gpu,
        gpus,
        load_cluster,
        plain_name,
        read_cluster,
    )

_MODELS, _HARDWARE = "meshwright.spec.catalog.architectures", "meshwright.spec.catalog.hardware"

_HOMES = {
    "CatalogModel": _MODELS,
    "cluster": _HARDWARE,
    "clusters": _HARDWARE,
    "gpu": _HARDWARE,
    "gpus": _HARDWARE,
    "load_cluster": _HARDWARE,
    "model": _MODELS,
    "models": _MODELS,
    "plain_name": _HARDWARE,
    "read_cluster": _HARDWARE,
}

__all__ = [
    "CatalogModel",
    "cluster",
    "clusters",
    "gpu",
    "gpus",
    "load_cluster",
    "model",
    "models",
    "plain_name",
    "read_cluster",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
