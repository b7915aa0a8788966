"""Whose a series is: the node, GPU, device and job that its labels name.

dcgm-exporter renamed `Hostname` to `hostname`, writes `UUID` or `uuid`, and tells of pods as `pod`
or `pod_name`; where Prometheus puts its own `pod` there, the exporter's becomes `exported_pod`. An
empty label is one that is not there.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

GPU_LABELS: Final = (
    "Hostname", "hostname", "exported_Hostname", "exported_hostname", "node", "exported_node",
    "kubernetes_node", "nodename", "instance", "gpu", "minor_number", "GPU_I_ID", "GPU_I_PROFILE",
    "modelName", "model_name",
)  # fmt: skip
"""What a sample of a GPU is told apart by."""
DEVICE_LABELS: Final = ("UUID", "uuid", "gpu_uuid", "name")
JOB_LABELS: Final = (
    "hpc_job", "exported_hpc_job", "pod", "exported_pod", "pod_name", "namespace",
    "exported_namespace", "pod_namespace",
)  # fmt: skip
_SLICES = {"A30": 4}
"""Slices of GPUs that are divided into other than seven."""


class NodeNaming(NamedTuple):
    """How nodes are called here."""

    node_label: str = ""
    """The label that names nodes, where one is told."""
    domain_suffix: str = ""
    """An ending that is left out: Slurm's names are short, others' may not be."""
    renames: Mapping[str, str] = {}
    """Today's name of a node by one it had."""
    node_by_instance: Mapping[str, str] = {}
    """The name of a node by the address that is scraped."""


def parse_node(labels: Mapping[str, str], naming: NodeNaming) -> str:
    """Return the node of a series."""
    return _named(_node(labels, naming), naming)


def _node(labels: Mapping[str, str], naming: NodeNaming) -> str:
    if naming.node_label:
        return labels.get(naming.node_label, "")
    told = _first(labels, "exported_Hostname", "exported_hostname", "Hostname", "hostname")
    host = strip_port(labels.get("instance", ""))
    # Inside Kubernetes older exporters give the name of their own pod for that of the node.
    if told and "dcgm-exporter" not in told:
        return told
    placed = _first(labels, "exported_node", "node", "kubernetes_node", "nodename")
    return placed or naming.node_by_instance.get(host, "") or told or host


def _named(node: str, naming: NodeNaming) -> str:
    short = (
        node.removesuffix("." + naming.domain_suffix.lstrip(".")) if naming.domain_suffix else node
    )
    return naming.renames.get(short, short)


def strip_port(instance: str) -> str:
    """Return an address without its port."""
    host, colon, port = instance.rpartition(":")
    return host.strip("[]") if colon and port.isdigit() else instance


def parse_gpu(labels: Mapping[str, str]) -> int | None:
    """Return the index of the GPU; None where the labels name none."""
    text = _first(labels, "gpu", "minor_number")
    return int(text) if text.isdigit() else None


def parse_uuid(labels: Mapping[str, str]) -> str:
    """Return the device's own name; empty where the labels name none."""
    return _first(labels, "UUID", "uuid", "gpu_uuid")


def parse_gpu_kind(labels: Mapping[str, str]) -> str | None:
    """Return the model of the GPU."""
    return _first(labels, "modelName", "model_name", "name") or None


def parse_mig_instance(labels: Mapping[str, str]) -> str:
    """Return the number of the instance of a divided GPU; empty for a whole one."""
    return labels.get("GPU_I_ID", "")


def parse_mig_fraction(labels: Mapping[str, str]) -> float:
    """Return which part of its GPU an instance is: 3/7 of `3g.20gb`."""
    if not parse_mig_instance(labels):
        return 1.0
    model = parse_gpu_kind(labels) or ""
    slices = next((each for name, each in _SLICES.items() if name in model.split()), 7)
    count = labels.get("GPU_I_PROFILE", "").partition("g")[0].rpartition(".")[2]
    return min(int(count), slices) / slices if count.isdigit() else 1 / slices


def parse_job(labels: Mapping[str, str]) -> str:
    """Return the job that holds the GPU: Slurm's number, or `namespace/pod`; empty for none."""
    number = _first(labels, "exported_hpc_job", "hpc_job")
    if number:
        return number
    # Once there is an `exported_pod`, `pod` is the exporter's own, wherever it has none to tell.
    exported = "exported_pod" in labels
    pod = labels["exported_pod"] if exported else _first(labels, "pod", "pod_name")
    if not pod or "dcgm-exporter" in pod:
        return ""
    space = _first(labels, "exported_namespace") if exported else ""
    space = space or _first(labels, "pod_namespace", "namespace")
    return f"{space}/{pod}" if space else pod


def _first(labels: Mapping[str, str], *names: str) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")
