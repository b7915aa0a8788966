"""Turn one row of published measurements into a `Cluster` and a `Placement`.

It reads only the row's own words (GPU, nodes, links, network, note): general rules, no list of
systems. What a row does not say is taken from the GPU's year, and the reader says so.
"""

import re
from functools import lru_cache
from itertools import islice

import msgspec

from meshwright.errors import InputError
from meshwright.predict.network import Placement, build_placement
from meshwright.predict.validation.collectives.row_fields import (
    UnreadableRowError,
    read_count,
    read_text,
)
from meshwright.predict.validation.collectives.sweep_rows import Row
from meshwright.spec.catalog import get_gpu
from meshwright.spec.cluster import Cluster, Fabric, Gpu, Host, Nics, ScaleUpDomain, SwitchTier

GBIT = 1e9 / 8
# Network speed per GPU of the machines sold in a GPU's year, for rows that do not state it.
_USUAL_GBIT = {"sm_70": 100, "sm_80": 200, "sm_90": 400, "sm_100": 400, "sm_103": 800}
_FABRICS = (
    ("efa", r"\bEFA"),
    ("slingshot", r"Slingshot"),
    ("ethernet", r"TCPX"),
    ("roce", r"RoCE|Pollara|Thor"),
    ("infiniband", r"\bIB\b|InfiniBand|NDR|HDR"),
    ("ethernet", r"\bTCP\b|[Ee]thernet|GbE\b"),
)
# TCP through the host's sockets: in a note even over wires that could do better.
_SOCKETS = r"\(TCP\)|\bsockets?\b"


class MeasuredSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What a row was measured on."""

    cluster: Cluster
    placement: Placement
    assumed: tuple[str, ...]
    """What the row did not say."""


def read_system(row: Row) -> MeasuredSystem:
    """Return the cluster and the group of a row."""
    name = read_text(row, "gpu")
    if not name:
        raise UnreadableRowError("the row does not name its GPU")
    nodes, gpus, used = _counts(row)
    said = read_text(row, "intra"), read_text(row, "inter"), read_text(row, "note")
    try:
        return _system(name, (nodes, gpus, used), said)
    except InputError as error:
        raise UnreadableRowError(f"the row describes no possible cluster: {error}") from None


def _counts(row: Row) -> tuple[int, int, int]:
    """Return the nodes, the GPUs, and how many of a node's GPUs take part."""
    nodes, gpus, each = (read_count(row, name) for name in ("nodes", "gpus", "gpus_per_node"))
    if gpus is None and nodes is not None and each is not None:
        gpus = nodes * each
    if nodes is None and gpus is not None and each is not None:
        nodes = -(-gpus // each)
    if gpus is None or nodes is None:
        raise UnreadableRowError("the row does not say how many GPUs on how many nodes")
    if nodes > gpus:
        raise UnreadableRowError(f"{gpus} GPUs cannot be on {nodes} nodes")
    if gpus == 1:
        raise UnreadableRowError("a single GPU has no peer")
    return nodes, gpus, max(each or 1, -(-gpus // nodes))


@lru_cache(maxsize=4096)
def _system(name: str, counts: tuple[int, int, int], said: tuple[str, str, str]) -> MeasuredSystem:
    nodes, gpus, used = counts
    intra, inter, note = said
    gpu = _gpu(name)
    node, domain = _node(gpu, used, intra, gpus)
    cards, speed, assumed = _cards(gpu, node, inter) if nodes > 1 else (0, 0.0, ())
    if cards and _fabric_kind(inter) is None:
        assumed = ("InfiniBand", *assumed)
    cluster = Cluster(
        name="row",
        title=name,
        gpu=gpu,
        nodes=max(nodes, -(-gpus // used)),
        gpus_per_node=node,
        scale_up=_scale_up(gpu, node, domain, intra),
        host=Host(gpu_bytes_per_s=_host(gpu, domain > node), latency_s=1e-6),
        nics=Nics(per_node=cards, nic_bytes_per_s=speed, latency_s=2.7e-6) if cards else None,
        fabric=_fabric(inter) if cards else Fabric(kind="none"),
    )
    ranks = (index * node + local for index in range(nodes) for local in range(used))
    place = build_placement(cluster, tuple(islice(ranks, gpus)), sharers=1)
    if cards and _on_sockets(cluster.fabric, inter, note):
        # A cluster says what its wires are; that NCCL did not use them as such is the run's own.
        links = msgspec.structs.replace(place.links, fabric="sockets")
        place = msgspec.structs.replace(place, links=links)
    return MeasuredSystem(cluster=cluster, placement=place, assumed=assumed)


def _gpu(name: str) -> Gpu:
    words = re.sub(r"\([^()]*\)", " ", name).split()
    for length in range(len(words), 0, -1):
        try:
            return get_gpu("-".join(words[:length]))
        except InputError:
            continue
    raise UnreadableRowError(f"the catalog has no GPU {name}")


def _node(gpu: Gpu, used: int, intra: str, gpus: int) -> tuple[int, int]:
    """Return the GPUs of a node and of its scale-up domain."""
    if "NVL72" in intra:
        # Jobs that do not fill racks of 72 take 64 GPUs of each.
        return used, 72 if gpus <= 72 or gpus % 72 == 0 else 64
    if "NVSwitch" in intra or (gpu.arch in ("sm_70", "sm_100", "sm_103") and intra):
        return max(8, used), max(8, used)
    if gpu.vendor == "amd" and intra:
        return max(8, used), max(8, used)
    return used, used


def _scale_up(gpu: Gpu, node: int, domain: int, intra: str) -> ScaleUpDomain:
    rate = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s or 1e9
    if gpu.vendor == "amd":
        pair = rate / 7 if domain > 1 else None
        return ScaleUpDomain(
            kind="xgmi",
            gpus=domain,
            gpu_bytes_per_s=rate,
            pair_bytes_per_s=pair,
            latency_s=0.6e-6,
        )
    mesh = "mesh" in intra or (gpu.arch == "sm_70" and "NVSwitch" not in intra)
    pair = 25e9 if gpu.arch == "sm_70" else rate / max(1, node - 1)
    return ScaleUpDomain(
        kind="nvlink",
        gpus=domain,
        gpu_bytes_per_s=rate,
        pair_bytes_per_s=pair if mesh else None,
        latency_s=0.6e-6,
        switched=not mesh,
        in_network_reduction=not mesh and gpu.arch not in ("sm_70", "sm_80"),
    )


def _host(gpu: Gpu, coherent: bool) -> float:
    return 225e9 if coherent else gpu.pcie_bytes_per_s or 16e9


def _cards(gpu: Gpu, node: int, inter: str) -> tuple[int, float, tuple[str, ...]]:
    """Return the network cards of a node and the speed of one."""
    usual = _USUAL_GBIT.get(gpu.arch, 400)
    each = re.search(r"(\d+)x\s*(?:(\d+)x)?\s*(?:dual-port\s*)?(\d+)\s*Gb/s( per GPU)?", inter)
    if each is not None:
        count = int(each[1]) * int(each[2] or 1) * (2 if "dual-port" in inter else 1)
        return count * (node if each[4] else 1), int(each[3]) * GBIT, ()
    total = re.search(r"(\d+(?:\.\d+)?)\s*(Tb|Gb)/s", inter)
    if total is not None:
        gbit = float(total[1]) * (1000 if total[2] == "Tb" else 1)
        return node, gbit / node * GBIT, ()
    assumed = f"{usual} Gb/s per GPU"
    return node, usual * GBIT, (assumed,)


def _fabric_kind(inter: str) -> str | None:
    return next((kind for kind, words in _FABRICS if re.search(words, inter)), None)


def _fabric(inter: str) -> Fabric:
    kind = _fabric_kind(inter) or "infiniband"
    return Fabric(kind=kind, tiers=(SwitchTier(name="fabric"),))  # type: ignore[arg-type]


def _on_sockets(fabric: Fabric, inter: str, note: str) -> bool:
    """Say whether messages went through the host's sockets, whatever the wires are."""
    plain = fabric.kind == "ethernet" and "TCPX" not in inter
    return plain or re.search(_SOCKETS, f"{note} {inter}") is not None
