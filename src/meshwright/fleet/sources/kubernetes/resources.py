"""GPUs among the resources of pods and nodes, whole and in parts."""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.fleet.sources.kubernetes.quantities import get_list, get_mapping, parse_quantity

_WHOLE = re.compile(r"^(nvidia\.com/gpu|amd\.com/gpu|gpu\.intel\.com/(i915|xe)|nvidia\.com/pgpu)$")
_INSTANCE = re.compile(r"^nvidia\.com/mig-(\d+)g\.")
_SHARED = re.compile(r"^nvidia\.com/gpu\.shared$")
MIG_SLICES = 7
"""Of a GPU that can be divided; of an A30 there are four, which its product tells."""


NODE_POOL_LABELS = (
    "cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool", "agentpool", "nodepool",
)  # fmt: skip
"""Labels that name the pool of a node."""


def compute_gpu_fraction(resource: str, labels: Mapping[str, Any] | None = None) -> float:
    """Return how many GPUs one of a resource is; nought where it is no GPU.

    `labels` are those of a node, where they are known: they tell among how many a GPU is shared.
    """
    labels = labels or {}
    if _WHOLE.match(resource):
        # Replicas under the plain name are announced by the node's labels alone.
        shared = str(labels.get("nvidia.com/gpu.sharing-strategy", "none")) != "none"
        return 1 / _replicas(labels) if shared else 1.0
    if _SHARED.match(resource):
        return 1 / _replicas(labels)
    if found := _INSTANCE.match(resource):
        product = str(labels.get("nvidia.com/gpu.product", ""))
        slices = 4 if re.search(r"\bA30\b", product) else MIG_SLICES
        return min(int(found[1]), slices) / slices
    return 0.0


def _replicas(labels: Mapping[str, Any]) -> float:
    return max(1.0, parse_quantity(labels.get("nvidia.com/gpu.replicas")) or 1.0)


def decode_resource_name(sanitised: str) -> str:
    """Return a resource by the name kube-state-metrics gives it: `nvidia_com_gpu`."""
    name = re.sub(r"^(nvidia|amd)_com_", r"\1.com/", sanitised)
    name = re.sub(r"^gpu_intel_com_", "gpu.intel.com/", name)
    return re.sub(r"^(nvidia\.com/)mig_(\d+g)_(.*)$", r"\1mig-\2.\3", name).replace(
        "gpu_shared", "gpu.shared"
    )


def read_requests(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a container asks for; for GPUs a limit alone is a request."""
    return {
        **get_mapping(container, "resources", "limits"),
        **get_mapping(container, "resources", "requests"),
    }


def count_container_gpus(
    container: Mapping[str, Any], labels: Mapping[str, Any] | None = None
) -> float:
    """Return how many GPUs a container asks for."""
    return sum(
        compute_gpu_fraction(name, labels) * (parse_quantity(value) or 0.0)
        for name, value in read_requests(container).items()
    )


def sum_pod_requests(spec: Mapping[str, Any], each: Any) -> float:
    """Return what a pod asks for: its containers and sidecars together, or its greediest start.

    `each` gives what one container asks for. Containers that prepare a pod run before it, one by
    one; those with `restartPolicy: Always` stay.
    """
    first = get_list(spec, "initContainers")
    stay = sum(each(one) for one in first if one.get("restartPolicy") == "Always")
    most = max((each(one) for one in first if one.get("restartPolicy") != "Always"), default=0.0)
    return float(max(sum(each(one) for one in get_list(spec, "containers")) + stay, most))
