"""Turn the `LinkGraph` of a real machine into a `Cluster` of such machines.

It sums links up into the regular picture that a `Cluster` is: the slowest GPU's links stand for
all, and the cards nearest to GPUs for the network. What the graph cannot tell (the fabric, speeds
nobody printed) is an argument.
"""

import re
from collections import Counter

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster.cluster import Cluster
from meshwright.spec.cluster.cluster_components import Fabric, Host, Nics, ScaleUpDomain, SwitchTier
from meshwright.spec.cluster.gpu import Gpu
from meshwright.spec.cluster.link_graph import DisjointSets, LinkGraph

_SCALE_UP = ("nvlink", "xgmi")
# One hop, as NCCL 2.30.7 counts it for its LL protocol: NVLink, PCIe, network.
_NVLINK_LATENCY_S, _PCIE_LATENCY_S, _NET_LATENCY_S = 0.6e-6, 1e-6, 2.7e-6


def build_cluster(
    graph: LinkGraph,
    gpu: Gpu,
    *,
    name: str = "machine",
    title: str = "",
    nodes: int = 1,
    fabric: Fabric | None = None,
    nic_bytes_per_s: float | None = None,
) -> Cluster:
    """Return a cluster of `nodes` machines, each wired like `graph` and built of `gpu`.

    `nic_bytes_per_s` is the speed of NICs whose speed the graph does not know; without it such
    NICs are left out. `fabric` defaults to one InfiniBand layer without oversubscription.
    """
    problems: list[Problem] = []
    hosts = Counter(vertex.node for vertex in graph.vertices_of_kind("gpu"))
    if not hosts:
        fix = "read the topology of a machine with GPUs"
        raise InputError([Problem("graph", "holds no GPU", fix)])
    if len(set(hosts.values())) > 1:
        what = f"hosts with different GPU counts: {dict(hosts)}"
        problems.append(Problem("graph", what, "describe each kind of host by itself"))
    problems += _other_architectures(graph, gpu)
    nics = _nics(graph, len(hosts), nic_bytes_per_s)
    if nodes > 1 and nics is None:
        fix = "give nic_bytes_per_s"
        problems.append(Problem("nics", "no NIC with a known speed joins the nodes", fix))
    domains = _domains(graph)
    if len({len(domain) for domain in domains}) > 1:
        sizes = ", ".join(str(len(domain)) for domain in domains)
        what = f"NVLink joins groups of different sizes: {sizes}"
        problems.append(Problem("graph", what, "leave out the GPUs that are not linked alike"))
    if problems:
        raise InputError(problems)
    host = _host(graph)
    return Cluster(
        name=name,
        title=title or name,
        gpu=gpu,
        nodes=nodes * len(hosts),
        gpus_per_node=next(iter(hosts.values())),
        scale_up=_scale_up(graph, gpu, domains, host),
        host=host,
        nics=nics,
        fabric=_fabric(nics, fabric),
    )


def _other_architectures(graph: LinkGraph, gpu: Gpu) -> list[Problem]:
    """Say which architectures the graph names that are not the GPU's."""
    found = {vertex.arch: vertex.name for vertex in graph.vertices_of_kind("gpu") if vertex.arch}
    return [
        Problem(
            "gpu",
            f"{name} of the topology is {arch}, {gpu.name} is {gpu.arch}",
            f"name a GPU of {arch}",
        )
        for arch, name in found.items()
        # The letter of sm_90a is about instructions, not about the device.
        if arch != gpu.arch.rstrip("af" if gpu.arch.startswith("sm_") else "")
    ]


def find_closest_nics(graph: LinkGraph) -> dict[str, tuple[str, ...]]:
    """Return, for every GPU, the network cards that the fewest links lead to."""
    cards = [vertex.name for vertex in graph.vertices_of_kind("nic")]
    nearest: dict[str, tuple[str, ...]] = {}
    for gpu in graph.vertices_of_kind("gpu"):
        paths = {card: graph.shortest_path(gpu.name, card) for card in cards}
        hops = {card: len(path.vertices) for card, path in paths.items() if path is not None}
        least = min(hops.values(), default=0)
        nearest[gpu.name] = tuple(card for card, count in hops.items() if count == least)
    return nearest


def _domains(graph: LinkGraph) -> list[list[str]]:
    """Return the groups of GPUs that NVLink or xGMI joins."""
    joined = DisjointSets(vertex.name for vertex in graph.vertices)
    for link in graph.links:
        if link.kind in _SCALE_UP:
            joined.union(link.source, link.target)
    gpus = {vertex.name for vertex in graph.vertices_of_kind("gpu")}
    groups = [[name for name in group if name in gpus] for group in joined.list_sets()]
    return [group for group in groups if group]


def _scale_up(graph: LinkGraph, gpu: Gpu, domains: list[list[str]], host: Host) -> ScaleUpDomain:
    wires = [link for link in graph.links if link.kind in _SCALE_UP]
    members = {name for domain in domains for name in domain}
    if len(domains[0]) == 1:
        # Without links of their own, GPUs reach each other over PCIe below one CPU.
        below = Counter(_cpu_of(graph).values())
        even = len(set(below.values())) == 1
        return ScaleUpDomain(
            kind="pcie",
            gpus=next(iter(below.values())) if even else 1,
            gpu_bytes_per_s=host.gpu_bytes_per_s,
            latency_s=_PCIE_LATENCY_S,
        )
    sums = dict.fromkeys(members, 0.0)
    for link in wires:
        if link.source in members:
            sums[link.source] += link.link_bytes_per_s
    switched = any(link.target not in members for link in wires)
    direct = [link.link_bytes_per_s for link in wires if link.target in members]
    return ScaleUpDomain(
        kind="xgmi" if wires[0].kind == "xgmi" else "nvlink",
        gpus=len(domains[0]),
        gpu_bytes_per_s=min(sums.values()),
        pair_bytes_per_s=None if switched else min(*direct, *sums.values()),
        latency_s=_NVLINK_LATENCY_S,
        switched=switched,
        in_network_reduction=switched and _reduces_in_switch(gpu.arch),
    )


def _reduces_in_switch(arch: str) -> bool:
    # NVLink SHARP came with Hopper's NVSwitch.
    version = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return version is not None and int(version[1]) >= 90


def _cpu_of(graph: LinkGraph) -> dict[str, str]:
    """Return the nearest CPU of every GPU that has one."""
    cpus = [vertex.name for vertex in graph.vertices_of_kind("cpu")]
    nearest: dict[str, str] = {}
    for gpu in graph.vertices_of_kind("gpu"):
        routes = [graph.shortest_path(gpu.name, cpu) for cpu in cpus]
        found = [route.vertices for route in routes if route is not None]
        if found:
            nearest[gpu.name] = min(found, key=len)[-1]
    return nearest


def _host(graph: LinkGraph) -> Host:
    cpu_of = _cpu_of(graph)
    lost = [vertex.name for vertex in graph.vertices_of_kind("gpu") if vertex.name not in cpu_of]
    if lost:
        what = f"no CPU is linked to {', '.join(lost)}"
        raise InputError([Problem("graph", what, "add the links between these GPUs and a CPU")])
    hosts = {vertex.node for vertex in graph.vertices_of_kind("gpu")}
    across = [link.link_bytes_per_s for link in graph.links if link.kind == "socket"]
    return Host(
        link="c2c" if any(link.kind == "c2c" for link in graph.links) else "pcie",
        gpu_bytes_per_s=min(graph.path_bytes_per_s(gpu, cpu) for gpu, cpu in cpu_of.items()),
        latency_s=_PCIE_LATENCY_S,
        # CPUs without a GPU (a NUMA node that only holds a storage card) do not count.
        sockets=max(1, len(set(cpu_of.values())) // len(hosts)),
        socket_bytes_per_s=min(across) if across else None,
    )


def _nics(graph: LinkGraph, hosts: int, assumed: float | None) -> Nics | None:
    """Return the cards that carry GPU traffic: the fastest of those nearest to GPUs."""
    near = {card for cards in find_closest_nics(graph).values() for card in cards}
    speeds = {
        vertex.name: vertex.port_bytes_per_s or assumed
        for vertex in graph.vertices_of_kind("nic")
        if vertex.name in near
    }
    known = [speed for speed in speeds.values() if speed is not None]
    if not known:
        return None
    fastest = max(known)
    count = sum(speed == fastest for speed in speeds.values())
    return Nics(per_node=max(1, count // hosts), nic_bytes_per_s=fastest, latency_s=_NET_LATENCY_S)


def _fabric(nics: Nics | None, fabric: Fabric | None) -> Fabric:
    if nics is None:
        return Fabric(kind="none")
    return fabric or Fabric(kind="infiniband", tiers=(SwitchTier(name="fabric"),))
