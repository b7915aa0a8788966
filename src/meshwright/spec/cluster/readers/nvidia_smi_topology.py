"""Read the matrix that `nvidia-smi topo -m` prints into a `LinkGraph`.

The matrix says how each pair of devices is joined (NVLinks, one PCIe switch, several, the CPU, the
link between CPUs) but no speed: NVLink's follows from the GPU's architecture, PCIe's from the GPU.
Colour codes, tabs or spaces, prompts around the table and missing columns are all accepted.
"""

import re
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster import link_speeds
from meshwright.spec.cluster.gpu import Gpu
from meshwright.spec.cluster.link_graph import (
    DisjointSets,
    GraphLink,
    GraphVertex,
    LinkGraph,
    LinkKind,
    make_duplex_links,
)
from meshwright.spec.serialization import format_value

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU\d+")
_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*")
_NVLINKS = re.compile(r"NV(\d{1,2})")
# From near to far; SOC is what drivers before 2017 called SYS.
_CELLS = ("X", "PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "N/A")
_SWITCH = ("PIX", "PXB")
_SAME_NUMA = ("PIX", "PXB", "PHB", "NODE")
_PRINT_AGAIN = "paste the whole output of nvidia-smi topo -m again"


class _Table(NamedTuple):
    devices: list[str]
    cells: dict[tuple[str, str], str]
    numa: dict[str, str]
    names: dict[str, str]


def read_nvidia_smi_topology(
    text: str, gpu: Gpu, where: str = "topology", socket_bytes_per_s: float = 16e9
) -> LinkGraph:
    """Return the machine that `nvidia-smi topo -m` shows, built of `gpu`.

    `socket_bytes_per_s` is what crosses between CPU sockets; the default is NCCL's figure for AMD.
    """
    table = _table(text, where)
    problems = _disagreements(table, where)
    sm = re.fullmatch(r"sm_(\d+)[af]?", gpu.arch)
    nvlink = link_speeds.nvlink_bytes_per_s(int(sm[1])) if sm else None
    linked = any(_NVLINKS.fullmatch(cell) for cell in table.cells.values())
    if linked and nvlink is None:
        what = f"there are NVLinks, but {gpu.name} ({gpu.arch}) has none"
        problems.append(Problem(where, what, "name the GPU of this machine"))
    ports = _ports(gpu, nvlink)
    widest = max(_nvlink_counts(table).items(), key=lambda item: item[1], default=None)
    if nvlink is not None and widest is not None and widest[1] > ports:
        (a, b), count = widest
        what = f"{a} to {b} is NV{count}, but {gpu.name} has {ports} NVLinks"
        problems.append(Problem(where, what, "name the GPU of this machine"))
    if gpu.pcie_bytes_per_s is None:
        fix = "add it to the GPU: its link to the host, per direction"
        problems.append(Problem(where, f"{gpu.name} has no pcie_bytes_per_s", fix))
    if problems or gpu.pcie_bytes_per_s is None:
        raise InputError(problems)
    vertices, links = _pcie(table, gpu.pcie_bytes_per_s, socket_bytes_per_s)
    if nvlink is not None:
        switch, wires = _nvlinks(table, nvlink, ports)
        vertices += switch
        links += wires
    return LinkGraph(vertices=tuple(vertices), links=tuple(links))


def _table(text: str, where: str) -> _Table:
    lines = [_ESCAPE.sub("", line).replace("\r", "") for line in text.splitlines()]
    devices: list[str] = []
    table = _Table(devices, {}, {}, {})
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        legend = _LEGEND.fullmatch(line)
        if legend:
            table.names[legend[1]] = legend[2]
        elif not devices:
            devices.extend(_header(words))
        elif words and words[0] in devices:
            problem = _row(words, table)
            if problem:
                problems.append(Problem(f"{where}: line {number}", problem, _PRINT_AGAIN))
    if not devices:
        what = "holds no table of nvidia-smi topo -m"
        raise InputError([Problem(where, what, "its header names GPU0, GPU1 and so on")])
    missing = [name for name in devices if (name, name) not in table.cells]
    if missing and not problems:
        what = f"the table has no row for {', '.join(missing)}"
        problems.append(Problem(where, what, _PRINT_AGAIN))
    if problems:
        raise InputError(problems)
    return table


def _header(words: list[str]) -> list[str]:
    """Return the devices of a header line; nothing where the line is not one."""
    ends = [index for index, word in enumerate(words) if word in ("CPU", "NUMA", "GPU")]
    devices = words[: ends[0]] if ends else words
    is_row = len(words) > 1 and (words[1] in _CELLS or _NVLINKS.fullmatch(words[1]))
    if not devices or is_row or not _GPU.fullmatch(devices[0]) or len(set(devices)) < len(devices):
        return []
    return devices


def _row(words: list[str], table: _Table) -> str:
    """Enter one row; return what is wrong with it."""
    name, cells = words[0], words[1 : 1 + len(table.devices)]
    if (name, name) in table.cells:
        return f"{name} has a second row"
    if len(cells) < len(table.devices):
        return f"the row of {name} has {len(cells)} cells, not {len(table.devices)}"
    for other, cell in zip(table.devices, cells, strict=True):
        if cell not in _CELLS and not _NVLINKS.fullmatch(cell):
            return (
                f"{format_value(cell)} between {name} and {other} is none of "
                f"{', '.join(_CELLS)}, NV#"
            )
        if (cell == "X") != (name == other):
            return f"{name} to {other} is {cell}"
        table.cells[name, other] = "SYS" if cell == "SOC" else cell
    # What follows is the CPU affinity, then the NUMA node in newer drivers.
    rest = words[1 + len(table.devices) :]
    place = rest[1] if len(rest) > 1 and rest[1].isdigit() else rest[0] if rest else "N/A"
    if place != "N/A" and _GPU.fullmatch(name):
        table.numa[name] = place
    return ""


def _disagreements(table: _Table, where: str) -> list[Problem]:
    return [
        Problem(where, f"{a} to {b} is {cell}, but {b} to {a} is {table.cells[b, a]}", _PRINT_AGAIN)
        for (a, b), cell in table.cells.items()
        if a < b and cell != table.cells[b, a]
    ]


def _pcie(
    table: _Table, pcie_bytes_per_s: float, socket_bytes_per_s: float
) -> tuple[list[GraphVertex], list[GraphLink]]:
    """Rebuild the PCIe tree: devices below switches, switches below CPUs, CPUs side by side."""
    one_bridge, switches, cpus = (DisjointSets(table.devices) for _ in range(3))
    for (a, b), cell in table.cells.items():
        if cell == "PIX":
            one_bridge.union(a, b)
        if cell in _SWITCH:
            switches.union(a, b)
        if cell in _SAME_NUMA:
            cpus.union(a, b)
    # NVLink hides how two GPUs are joined by PCIe; the NUMA column still tells their CPU.
    first_on: dict[str, str] = {}
    for device, numa in table.numa.items():
        cpus.union(first_on.setdefault(numa, device), device)
    drawn: dict[str, GraphVertex] = {}
    links: dict[tuple[str, str], GraphLink] = {}
    for index, members in enumerate(cpus.list_sets()):
        cpu = GraphVertex(name=f"cpu{index}", kind="cpu")
        for other in range(index):
            _join(links, f"cpu{other}", cpu.name, "socket", socket_bytes_per_s)
        drawn[cpu.name] = cpu
        for device in members:
            vertex = _device(table, device)
            drawn[vertex.name] = vertex
            below = vertex.name
            for switch in _switches_above(device, one_bridge, switches):
                drawn.setdefault(switch, GraphVertex(name=switch, kind="pcie-switch"))
                _join(links, below, switch, "pcie", pcie_bytes_per_s)
                below = switch
            _join(links, below, cpu.name, "pcie", pcie_bytes_per_s)
    return list(drawn.values()), list(links.values())


def _device(table: _Table, device: str) -> GraphVertex:
    if _GPU.fullmatch(device):
        return GraphVertex(name=device.lower(), kind="gpu")
    card = table.names.get(device, device)
    return GraphVertex(name=f"nic:{card}", kind="nic", label=card)


def _switches_above(device: str, one_bridge: DisjointSets, several: DisjointSets) -> list[str]:
    """Name the switches over a device; one of a single device, or of the same ones, is none."""
    near, far = len(one_bridge.members(device)), len(several.members(device))
    above = [f"pcie:{one_bridge.find(device)}"] if near > 1 else []
    return above + ([f"pcie-upper:{several.find(device)}"] if far > near else [])


def _join(
    links: dict[tuple[str, str], GraphLink], a: str, b: str, kind: LinkKind, rate: float
) -> None:
    links |= {(link.source, link.target): link for link in make_duplex_links(a, b, kind, rate)}


def _nvlink_counts(table: _Table) -> dict[tuple[str, str], int]:
    return {
        pair: int(match[1])
        for pair, cell in table.cells.items()
        if (match := _NVLINKS.fullmatch(cell))
    }


def _ports(gpu: Gpu, nvlink_bytes_per_s: float | None) -> int:
    """Return how many NVLinks a GPU has, as many as any where its figures do not tell."""
    if gpu.nvlink_bytes_per_s is None or nvlink_bytes_per_s is None:
        return link_speeds.MAX_NVLINKS
    return round(gpu.nvlink_bytes_per_s / nvlink_bytes_per_s)


def _nvlinks(
    table: _Table, nvlink_bytes_per_s: float, ports: int
) -> tuple[list[GraphVertex], list[GraphLink]]:
    counts = _nvlink_counts(table)
    gpus = {a for a, _ in counts}
    wires = {gpu: sum(count for (a, _), count in counts.items() if a == gpu) for gpu in gpus}
    # More wires than a GPU has ports means that all pairs share them through a switch.
    if any(total > ports for total in wires.values()):
        switch = [GraphVertex(name="nvswitch", kind="nvswitch")]
        widest = {gpu: max(n for (a, _), n in counts.items() if a == gpu) for gpu in sorted(gpus)}
        return switch, [
            link
            for gpu, count in widest.items()
            for link in make_duplex_links(
                gpu.lower(), "nvswitch", "nvlink", count * nvlink_bytes_per_s
            )
        ]
    return [], [
        GraphLink(
            source=a.lower(),
            target=b.lower(),
            kind="nvlink",
            link_bytes_per_s=count * nvlink_bytes_per_s,
        )
        for (a, b), count in counts.items()
    ]
