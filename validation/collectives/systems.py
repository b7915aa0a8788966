"""Turn one row of published measurements into a `Cluster` and a `Placement`.

It reads only the row's own words (GPU, nodes, links, network, note): general rules, no list of
systems. What a row does not say is taken from the GPU's year, and the reader says so.
"""

import re
from functools import lru_cache

import msgspec

from meshwright.errors import InputError
from meshwright.predict.network import Placement, placement
from meshwright.spec.catalog import gpu as catalog_gpu
from meshwright.spec.cluster import Cluster, Fabric, Gpu, Host, Nics, ScaleUp, Tier
from validation.collectives.rows import Row

GBIT = 1e9 / 8
# Network speed per GPU of the machines sold in a GPU's year, for rows that do not state it.
_USUAL_GBIT = {"sm_70": 100, "sm_80": 200, "sm_90": 400, "sm_100": 400, "sm_103": 800}
_FABRICS = (
    ("efa", r"\bEFA"),
    ("slingshot", r"Slingshot"),
    ("ethernet", r"TCPX|\bTCP\b"),
    ("roce", r"RoCE|Pollara|Thor"),
    ("infiniband", r"\bIB\b|InfiniBand|NDR|HDR"),
)


class System(msgspec.Struct, frozen=True, kw_only=True):
    """What a row was measured on."""

    cluster: Cluster
    place: Placement
    assumed: tuple[str, ...]
    """What the row did not say."""


class Unreadable(Exception):
    """A row that does not say what it was measured on."""


def system(row: Row) -> System:
    """Return the cluster and the group of a row."""
    if not row.get("gpu"):
        raise Unreadable("the row does not name its GPU")
    if not row.get("gpus") or not row.get("nodes"):
        raise Unreadable("the row does not say how many GPUs")
    used = max(row.get("gpus_per_node") or 1, -(-row["gpus"] // row["nodes"]))
    words = row.get("intra") or "", row.get("inter") or "", row.get("note") or ""
    try:
        return _system(row["gpu"], (row["nodes"], row["gpus"], used), words)
    except InputError as error:
        raise Unreadable(f"the row describes no possible cluster: {error}") from None


@lru_cache(maxsize=4096)
def _system(name: str, counts: tuple[int, int, int], words: tuple[str, str, str]) -> System:
    nodes, gpus, used = counts
    intra, inter, note = words
    gpu = _gpu(name)
    node, domain = _node(gpu, used, intra, gpus)
    count, speed, assumed = _cards(gpu, node, inter) if nodes > 1 else (0, 0.0, ())
    cluster = Cluster(
        name="row",
        title=name,
        gpu=gpu,
        nodes=max(nodes, -(-gpus // used)),
        gpus_per_node=node,
        scale_up=_scale_up(gpu, node, domain, intra),
        host=Host(gpu_bytes_per_s=_host(gpu, domain > node), latency_s=1e-6),
        nics=Nics(per_node=count, nic_bytes_per_s=speed, latency_s=2.7e-6) if count else None,
        fabric=_fabric(inter, note) if count else Fabric(kind="none"),
    )
    ranks = [index * node + local for index in range(nodes) for local in range(used)]
    place = placement(cluster, ranks[:gpus], sharers=1)
    return System(cluster=cluster, place=place, assumed=assumed)


def _gpu(name: str) -> Gpu:
    words = re.sub(r"\([^()]*\)", " ", name).split()
    for length in range(len(words), 0, -1):
        try:
            return catalog_gpu("-".join(words[:length]))
        except InputError:
            continue
    raise Unreadable(f"the catalog has no GPU {name}")


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


def _scale_up(gpu: Gpu, node: int, domain: int, intra: str) -> ScaleUp:
    rate = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s or 1e9
    if gpu.vendor == "amd":
        pair = rate / 7 if domain > 1 else None
        return ScaleUp(
            kind="xgmi",
            gpus=domain,
            gpu_bytes_per_s=rate,
            pair_bytes_per_s=pair,
            latency_s=0.6e-6,
        )
    mesh = "mesh" in intra or (gpu.arch == "sm_70" and "NVSwitch" not in intra)
    pair = 25e9 if gpu.arch == "sm_70" else rate / max(1, node - 1)
    return ScaleUp(
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


def _fabric(inter: str, note: str) -> Fabric:
    text = f"{note} {inter}" if "(TCP)" in note else inter
    kind = next((kind for kind, words in _FABRICS if re.search(words, text)), "infiniband")
    if "(TCP)" in note:
        kind = "ethernet"
    return Fabric(kind=kind, tiers=(Tier(name="fabric"),))  # type: ignore[arg-type]
