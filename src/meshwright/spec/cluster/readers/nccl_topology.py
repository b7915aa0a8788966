"""Read the topology that NCCL (or RCCL) writes with `NCCL_TOPO_DUMP_FILE` into a `LinkGraph`.

The file is XML: CPUs hold PCI devices, bridges hold more of them, and GPUs and network cards sit
at the ends. Files that clouds inject with `NCCL_TOPO_FILE` name only PCI devices; their class then
tells GPUs from cards. NVSwitches are drawn as one vertex, since traffic spreads over all of them.
"""

import re
from collections import defaultdict
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster import link_speeds
from meshwright.spec.cluster.link_graph import (
    GraphLink,
    GraphVertex,
    LinkGraph,
    LinkKind,
    VertexKind,
    make_duplex_links,
)
from meshwright.spec.serialization import format_value
from meshwright.spec.xml_elements import XmlElement, XmlProblems, read_xml

_NVSWITCH_CLASS = "0x068000"
_NVSWITCH = "nvswitch"
# NCCL's own fallback for a PCI device whose link it cannot read: generation 3, 16 lanes.
_DEFAULT_GT_PER_S = 8.0
_DEFAULT_LANES = 16
MAX_CPUS, MAX_GPUS = 256, 2_048
"""The largest domain that NCCL dumps today has 72 GPUs."""
_DUMP_AGAIN = "dump the file again with NCCL_TOPO_DUMP_FILE"
# RCCL numbered MI200 differently from its compiler.
_GFX = {"910": "90a"}


def read_nccl_topology(
    text: str, where: str = "topology", link_bytes_per_s: float | None = None
) -> LinkGraph:
    """Return the machine that an NCCL topology file describes.

    `link_bytes_per_s` is what one NVLink or xGMI link carries; None takes it from the GPU's
    architecture, which the file names.
    """
    root = read_xml(text, where, _DUMP_AGAIN)
    if root.tag != "system":
        what = f"the file begins with <{root.tag[:40]}>, not with <system>"
        fix = "give the file of NCCL_TOPO_DUMP_FILE, not of NCCL_GRAPH_DUMP_FILE"
        raise InputError([Problem(f"{where}: line {root.line}", what, fix)])
    reader = _Reader(where, link_bytes_per_s)
    for cpu in root.find_all("cpu"):
        reader.cpu(cpu)
    if not reader.faults.problems and not any(vertex.kind == "gpu" for vertex in reader.vertices):
        reader.faults.add(root, "the file names no GPU", _DUMP_AGAIN)
    reader.join_gpus()
    reader.join_sockets()
    reader.faults.raise_problems()
    return LinkGraph(vertices=tuple(reader.vertices), links=tuple(reader.links.values()))


class _Gpu(NamedTuple):
    name: str
    host: str
    bus: str
    cpu: str
    element: XmlElement


class _Reader:
    """Walks the elements, collecting vertices, links and problems."""

    def __init__(self, where: str, link_bytes_per_s: float | None) -> None:
        self.faults = XmlProblems(where)
        self.link_bytes_per_s = link_bytes_per_s
        self.vertices: list[GraphVertex] = []
        self.links: dict[tuple[str, str, str], GraphLink] = {}
        self._hosts: dict[str, str] = {}
        self._cpus: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._gpus: list[_Gpu] = []
        self._names: set[str] = {_NVSWITCH}
        self._repeats: dict[str, int] = defaultdict(lambda: 2)
        """The number that the next vertex of a name gets that is there already."""

    def cpu(self, element: XmlElement) -> None:
        # Dumps of one host carry no hash, or the same one on every CPU.
        host = self._hosts.setdefault(element.get("host_hash"), f"host{len(self._hosts)}")
        self._require_room(element, len(self._cpus[host]), MAX_CPUS, "CPUs of one host")
        name = self._vertex("cpu", host, f"cpu{element.get('numaid') or len(self._cpus[host])}")
        model = int(self.faults.number(element, "modelid", 0))
        rate = link_speeds.socket_bytes_per_s(element.get("arch"), element.get("vendor"), model)
        self._cpus[host].append((name, rate))
        for pci in element.find_all("pci"):
            self._pci(pci, name, host, name)
        for nic in element.find_all("nic"):
            self._nets(nic, name, host, None)

    def _require_room(self, element: XmlElement, count: int, most: int, what: str) -> None:
        """Refuse more of a kind than any machine has: they are compared with each other."""
        if count >= most:
            self.faults.add(element, f"the file has more than {most:,} {what}", _DUMP_AGAIN)
            self.faults.raise_problems()

    def _vertex(self, kind: VertexKind, host: str, name: str, label: str = "", **facts: Any) -> str:
        """Add a vertex under a name no other has; hosts from the second on prefix theirs."""
        wanted = name if host == "host0" else f"{host}.{name}"
        unique, again = wanted, self._repeats[wanted]
        while unique in self._names:
            unique, again = f"{wanted}#{again}", again + 1
        self._repeats[wanted] = again
        self._names.add(unique)
        self.vertices.append(GraphVertex(name=unique, kind=kind, label=label, node=host, **facts))
        return unique

    def _pci(self, element: XmlElement, parent: str, host: str, cpu: str) -> None:
        bus = element.get("busid").lower()
        if not bus:
            self.faults.add(element, "a <pci> has no busid", 'add one, such as "0000:18:00.0"')
            return
        rate = _pcie_rate(element)
        gpus, nics, kind = element.find_all("gpu"), element.find_all("nic"), element.get("class")
        if gpus or (kind.startswith(("0x03", "0x12")) and not element.children):
            name = self._gpu(gpus[0] if gpus else element, bus, host, cpu)
            self._join(parent, name, "pcie", rate)
        elif nics:
            for nic in nics:
                self._nets(nic, parent, host, rate)
        elif kind.startswith("0x02"):
            self._join(parent, self._vertex("nic", host, f"nic:{bus}", bus), "pcie", rate)
        elif element.find_all("pci"):
            name = self._vertex("pcie-switch", host, f"pci:{bus}", bus)
            self._join(parent, name, "pcie", rate)
            for child in element.find_all("pci"):
                self._pci(child, name, host, cpu)

    def _gpu(self, element: XmlElement, bus: str, host: str, cpu: str) -> str:
        index = element.get("dev") if element.tag == "gpu" else str(len(self._gpus))
        if not index.isdecimal():
            what = f"the GPU's dev {format_value(index)} is not a number"
            self.faults.add(element, what, f'write dev="{len(self._gpus)}"')
        if any(gpu.host == host and gpu.bus == bus for gpu in self._gpus):
            what = f"the bus address {format_value(bus)} is used twice"
            self.faults.add(element, what, "give each GPU the busid of its own device")
        self._require_room(element, len(self._gpus), MAX_GPUS, "GPUs")
        name = self._vertex("gpu", host, f"gpu{index}", bus, arch=_arch(element))
        self._gpus.append(_Gpu(name, host, bus, cpu, element))
        return name

    def _nets(self, nic: XmlElement, parent: str, host: str, rate: float | None) -> None:
        for net in nic.find_all("net"):
            # NCCL writes megabits per second; 0 or nothing where it does not know.
            port = self.faults.number(net, "speed", 0.0) * 1e6 / 8 or None
            label = net.get("name") or net.get("dev")
            facts = self._card_facts(net)
            name = self._vertex("nic", host, f"nic:{label}", label, port_bytes_per_s=port, **facts)
            # A card outside PCI (a socket of the host) is as near to its CPU as it is fast.
            self._join(parent, name, "pcie", rate or port or _pcie_default())

    def _card_facts(self, net: XmlElement) -> dict[str, Any]:
        """Return what a <net> states beside its speed; NCCL writes rail and plane since 2.30."""
        latency_us = self.faults.number(net, "latency", 0.0) if net.get("latency") else None
        return {
            "port_latency_s": None if latency_us is None else latency_us * 1e-6,
            "port": self._index(net, "port"),
            # All zeros is how plugins without an identifier fill it in.
            "guid": "" if not net.get("guid").strip("0x ") else net.get("guid").strip().lower(),
            "rail": self._index(net, "rail"),
            "plane": self._index(net, "plane"),
        }

    def _index(self, element: XmlElement, name: str) -> int | None:
        """Return a number that counts from 0; None where it is missing or -1, NCCL's unknown."""
        text = element.get(name).strip()
        if text in ("", "-1"):
            return None
        if not re.fullmatch(r"[0-9]{1,9}", text):
            what = f"{name} {format_value(text)} of <{element.tag}> is not a whole number from 0 up"
            self.faults.add(element, what, f'write {name}="0" or leave it out')
            return None
        return int(text)

    def join_gpus(self) -> None:
        """Draw NVLink, xGMI and C2C once every GPU is known."""
        anywhere = {gpu.bus: gpu.name for gpu in self._gpus}
        for gpu in self._gpus:
            here = {other.bus: other.name for other in self._gpus if other.host == gpu.host}
            for (target, kind), rate in self._wires(gpu, {**anywhere, **here}).items():
                self._link(gpu.name, target, kind, rate)
                # Both ends list their wires; until the other end's is met this stands for it.
                if target == _NVSWITCH or (target, gpu.name, kind) not in self.links:
                    self._link(target, gpu.name, kind, rate)
            for wires in gpu.element.find_all("c2c"):
                # NCCL writes megabytes per second and wire.
                count = self.faults.number(wires, "count", 1.0)
                rate = self.faults.number(wires, "bw", 0.0) * count * 1e6
                if rate > 0:
                    self._join(gpu.cpu, gpu.name, "c2c", rate)
        if any(target == _NVSWITCH for _, target, _ in self.links):
            self.vertices.append(GraphVertex(name=_NVSWITCH, kind="nvswitch"))

    def _wires(self, gpu: _Gpu, by_bus: dict[str, str]) -> dict[tuple[str, LinkKind], float]:
        """Return what one GPU's wires carry to each neighbour that the file knows."""
        rates: dict[tuple[str, LinkKind], float] = defaultdict(float)
        for wires in gpu.element.find_all("nvlink", "xgmi"):
            count = self.faults.number(wires, "count", 0.0)
            if count <= 0:
                what = f"count {format_value(wires.get('count'))} is not a number above 0"
                self.faults.add(wires, what, 'write how many links there are, such as count="1"')
                continue
            kind: LinkKind = "xgmi" if wires.tag == "xgmi" else "nvlink"
            target = by_bus.get(wires.get("target").lower())
            if wires.get("tclass").startswith(_NVSWITCH_CLASS):
                rates[_NVSWITCH, kind] += count * self._wire_rate(gpu.element, kind)
            elif target not in (None, gpu.name):
                rates[str(target), kind] += count * self._wire_rate(gpu.element, kind)
            # Any other target is a CPU, or a GPU that the process could not see.
        return rates

    def _wire_rate(self, gpu: XmlElement, kind: LinkKind) -> float:
        if self.link_bytes_per_s is not None:
            return self.link_bytes_per_s
        if kind == "xgmi":
            arch = gpu.get("gcn") or gpu.get("arch")
            rate = link_speeds.xgmi_bytes_per_s(arch)
        else:
            arch = gpu.get("sm")
            rate = link_speeds.nvlink_bytes_per_s(int(self.faults.number(gpu, "sm", 0)))
        if rate is None:
            what = f"no {kind} speed is known for the architecture {format_value(arch)}"
            self.faults.add(gpu, what, "give link_bytes_per_s")
        return rate or 1.0

    def join_sockets(self) -> None:
        """Draw the links between the CPUs of each host."""
        for cpus in self._cpus.values():
            for index, (cpu, rate) in enumerate(cpus):
                for other, other_rate in cpus[index + 1 :]:
                    self._join(cpu, other, "socket", min(rate, other_rate))

    def _link(self, source: str, target: str, kind: LinkKind, rate: float) -> None:
        self.links[source, target, kind] = make_duplex_links(source, target, kind, rate)[0]

    def _join(self, a: str, b: str, kind: LinkKind, rate: float) -> None:
        self._link(a, b, kind, rate)
        self._link(b, a, kind, rate)


def _arch(gpu: XmlElement) -> str:
    """Return the architecture that a <gpu> states; files that clouds inject state none."""
    # RCCL also fills in a compute capability, which means nothing there.
    if gfx := (gpu.get("gcn") or gpu.get("arch")).strip().lower().removeprefix("gfx"):
        return f"gfx{_GFX.get(gfx, gfx)}" if re.fullmatch(r"[0-9a-f]{3,4}", gfx) else ""
    sm = gpu.get("sm").strip()
    return f"sm_{sm}" if re.fullmatch(r"[1-9]\d{1,2}", sm) else ""


def _pcie_rate(element: XmlElement) -> float:
    speed = re.match(r"\s*(\d+(?:\.\d+)?)\s*GT/s", element.get("link_speed"))
    width = element.get("link_width").strip()
    lanes = int(width) if re.fullmatch(r"\d{1,2}", width) and int(width) else _DEFAULT_LANES
    rate = link_speeds.pcie_bytes_per_s(float(speed[1]), lanes) if speed else None
    return rate or _pcie_default(lanes)


def _pcie_default(lanes: int = _DEFAULT_LANES) -> float:
    rate = link_speeds.pcie_bytes_per_s(_DEFAULT_GT_PER_S, lanes)
    assert rate is not None
    return rate
