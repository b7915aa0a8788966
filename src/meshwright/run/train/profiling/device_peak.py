"""The peak of the device at hand, so that a run can say how much of it it uses."""

import re

import torch

from meshwright.spec import catalog
from meshwright.spec.cluster import Gpu


def find_catalog_gpu_of_device(device: torch.device) -> Gpu | None:
    """Return the catalog's entry of a CUDA device, by its name and memory; None where it has none.

    A driver's name ("NVIDIA H100 80GB HBM3") has the words of ours ("h100-80g-sxm") in part; where
    several entries share the model, the one nearest in memory is taken.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return find_catalog_gpu(properties.name, properties.total_memory)


def find_catalog_gpu(name: str, memory_bytes: int) -> Gpu | None:
    """Find the GPU that a driver calls so and that has about this much memory."""
    words = set(re.split(r"[\s\-_/]+", name.lower()))
    alike = [gpu for gpu in catalog.list_gpus().values() if gpu.name.split("-")[0] in words]
    if not alike:
        return None
    pcie = "pcie" in words

    def distance(gpu: Gpu) -> tuple[float, bool]:
        off = abs(gpu.memory_bytes - memory_bytes) / memory_bytes
        return (round(off, 1), ("pcie" in gpu.name) != pcie)

    return min(alike, key=distance)
