"""The cluster of a published run, from its GPU, its node size and the text about its network."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from meshwright.predict.network.nccl_constants import parse_sm
from meshwright.predict.validation.training.run_model import UnusableRowError
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster, Fabric, Gpu, Host, Nics, ScaleUpDomain, SwitchTier

# Where a row does not print its network, the maker's reference design for the GPU is taken:
# bytes per second and GPU.
_DESIGN_NIC = {"sm_70": 12.5e9, "sm_80": 25e9, "sm_90": 50e9, "sm_100": 50e9, "sm_103": 100e9}
_DEFAULT_NIC = 50e9
_GRACE = {"gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}
"""Parts that come with a CPU of their own: the catalog's cluster that says how they are joined."""

_FABRICS = (
    ("omni-path", "omnipath"),
    ("efa", "efa"),
    ("roce", "roce"),
    ("ethernet", "ethernet"),
)


def read_cluster(row: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a row ran on, just large enough for its GPUs."""
    gpu = catalog.get_gpu(row["gpu"])
    text = str(row.get("interconnect") or "")
    per_node = min(row.get("gpus_per_node") or 8, row["gpus"])
    nodes = -(-row["gpus"] // per_node)
    domain = per_node
    if "NVL72" in text or gpu.name.startswith("gb"):
        domain = _multiple(72, per_node)
    links = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s
    if links is None:
        raise UnusableRowError(f"nothing is known of the links of {gpu.name}")
    return Cluster(
        name="published",
        title=f"{row['gpus']} × {gpu.title}",
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=per_node,
        scale_up=ScaleUpDomain(
            kind="xgmi" if gpu.vendor == "amd" else "nvlink",
            gpus=domain,
            gpu_bytes_per_s=links,
            latency_s=0.6e-6,
            switched=gpu.vendor == "nvidia",
            in_network_reduction=(parse_sm(gpu.arch) or 0) >= 90,
        ),
        host=_host(gpu, per_node),
        nics=Nics(
            per_node=per_node, nic_bytes_per_s=parse_nic_bytes_per_s(text, per_node, gpu.arch),
            latency_s=5e-6,
        ),
        fabric=Fabric(kind=_fabric(text), tiers=(SwitchTier(name="leaf"),)),
    )  # fmt: skip


def _host(gpu: Gpu, per_node: int) -> Host:
    """Return the CPU side of a node: Grace beside the parts that come with it, PCIe elsewhere."""
    if gpu.name not in _GRACE:
        return Host(gpu_bytes_per_s=gpu.pcie_bytes_per_s or 32e9, latency_s=1e-6)
    usual = catalog.get_cluster(_GRACE[gpu.name])
    sockets = max(1, usual.host.sockets * per_node // usual.gpus_per_node)
    return replace(usual.host, sockets=sockets, memory_bytes=None, cores=None)


def _multiple(size: int, of: int) -> int:
    return size if size % of == 0 else of


def _fabric(text: str) -> Any:
    return next((kind for word, kind in _FABRICS if word in text.lower()), "infiniband")


def parse_nic_bytes_per_s(text: str, per_node: int, arch: str) -> float:
    """Read what one GPU may send to other nodes from words such as `8x HDR 200 Gb/s per node`.

    A small b means bits. What is said per GPU comes first, then a count of cards, then a node's
    sum; links inside the node (NVLink, NVSwitch) are not cards.
    """
    network = re.sub(r"NV(?:Link|Switch|L)[^;,:]*", "", text)
    per_gpu = re.search(r"([\d.]+) ?Gb(?:it)?/s(?: RDMA)?(?: per |/)GPU", network)
    if per_gpu:
        return float(per_gpu[1]) / 8 * 1e9
    cards = re.search(r"(\d+) ?x ?(?:[A-Z][A-Za-z-]* )*([\d.]+) ?G(b|B)(?:/s)?\b", network)
    if cards:
        rate = float(cards[2]) * 1e9 / (8 if cards[3] == "b" else 1)
        return int(cards[1]) * rate / per_node
    whole = re.search(r"([\d.]+) ?(T|G)b/s per node", network)
    if whole:
        return float(whole[1]) * (1e12 if whole[2] == "T" else 1e9) / 8 / per_node
    return _DESIGN_NIC.get(arch, _DEFAULT_NIC)
