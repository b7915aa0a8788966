"""Read and write the search graphs of NCCL: what `NCCL_GRAPH_DUMP_FILE` holds.

A graph says which rings, trees or NVLS heads NCCL found in one node: its channels, each with the
order of GPUs and the cards it enters and leaves by. Given back with `NCCL_GRAPH_FILE`, it forces
them. Format: NVIDIA/nccl 2.30.7, src/graph/search.cc. This module knows no algorithm's cost.
"""

from typing import Literal, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.name_suggestions import format_suggestion
from meshwright.spec.serialization import format_value
from meshwright.spec.xml_elements import XmlElement, XmlProblems, read_xml

GraphKind = Literal["ring", "tree", "collnet_chain", "nvls", "collnet_direct"]
"""Kinds in the order of their ids."""
NcclPattern = Literal["balanced_tree", "split_tree", "tree", "ring", "nvls", "collnet_direct"]
"""How traffic enters a node, in the order of their numbers from 1."""
PathType = Literal["LOC", "NVL", "NVB", "PIX", "PXB", "PXN", "P2C", "PHB", "SYS"]
"""The farthest kind of path that a graph needs, nearest first."""

KINDS: tuple[str, ...] = get_args(GraphKind)
PATTERNS: tuple[str, ...] = get_args(NcclPattern)
PATH_TYPES: tuple[str, ...] = get_args(PathType)

_GB = 1e9
_DUMP_AGAIN = "dump the file again with NCCL_GRAPH_DUMP_FILE"
_MOST_CHANNELS = 64


class NcclGraphGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a channel."""

    device: int
    """CUDA device of the node; in a rack's domain the host's number is in the upper bits."""
    rank: int | None = None
    """Rank in the communicator; NCCL before 2.30 does not write it."""


class NcclGraphChannel(msgspec.Struct, frozen=True, kw_only=True):
    """One channel: the way of data through the node."""

    gpus: tuple[NcclGraphGpu, ...]
    """GPUs in order; an NVLS channel names only its head."""
    entry_nic: int | None = None
    """Network device that data comes in by; None inside a single node."""
    exit_nic: int | None = None
    """Network device that data leaves by."""


class NcclSearchGraph(msgspec.Struct, frozen=True, kw_only=True):
    """What NCCL's search found for one kind of algorithm."""

    kind: GraphKind
    """Algorithm the graph is for."""
    pattern: NcclPattern
    """How traffic enters the node."""
    cross_nic: int = 0
    """Whether rings may leave by another card than they came by: 0 no, 1 yes, 2 where it helps."""
    intra_bytes_per_s: float = 0.0
    """What NCCL counts for each channel inside the node."""
    inter_bytes_per_s: float = 0.0
    """What NCCL counts for each channel between nodes."""
    inter_latency_s: float = 0.0
    """Latency of the cards, as their plugin states it."""
    type_intra: PathType = "LOC"
    """Farthest path between GPUs."""
    type_inter: PathType = "LOC"
    """Farthest path between a GPU and its card."""
    same_channels: bool = True
    """Whether all channels go the same way."""
    channels: tuple[NcclGraphChannel, ...] = ()
    """None where NCCL found no such graph."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("kind", self.kind, KINDS)
        bounds.one_of("pattern", self.pattern, PATTERNS)
        bounds.one_of("type_intra", self.type_intra, PATH_TYPES)
        bounds.one_of("type_inter", self.type_inter, PATH_TYPES)
        bounds.count(0, cross_nic=self.cross_nic)
        bounds.not_negative(
            intra_bytes_per_s=self.intra_bytes_per_s,
            inter_bytes_per_s=self.inter_bytes_per_s,
            inter_latency_s=self.inter_latency_s,
        )
        if len(self.channels) > _MOST_CHANNELS:
            what = f"{len(self.channels)} channels are more than NCCL's {_MOST_CHANNELS}"
            bounds.add("channels", what, f"keep {_MOST_CHANNELS}")
        for index, channel in enumerate(self.channels):
            for what, fix in _channel_faults(self.kind, channel, self.channels[0]):
                bounds.add(f"channels[{index}]", what, fix)
        bounds.raise_problems()

    @property
    def bus_bytes_per_s(self) -> float:
        """Return what NCCL counts for all channels inside the node together."""
        return len(self.channels) * self.intra_bytes_per_s


def read_nccl_graphs(text: str, where: str = "graphs") -> tuple[NcclSearchGraph, ...]:
    """Return the graphs of a dump, in their order; every fault is listed with its line."""
    root = read_xml(text, where, _DUMP_AGAIN)
    if root.tag != "graphs":
        what = f"the file begins with <{root.tag[:40]}>, not with <graphs>"
        fix = "give the file of NCCL_GRAPH_DUMP_FILE, not of NCCL_TOPO_DUMP_FILE"
        raise InputError([Problem(f"{where}: line {root.line}", what, fix)])
    faults = XmlProblems(where)
    if root.get("version") != "1":
        what = f"version {format_value(root.get('version'))} of the format is not known"
        faults.add(root, what, 'NCCL reads version="1" only: ' + _DUMP_AGAIN)
    found = [_graph(element, faults) for element in root.find_all("graph")]
    seen: set[str] = set()
    for element, graph in zip(root.find_all("graph"), found, strict=True):
        if graph is not None and graph.kind in seen:
            faults.add(element, f"a second graph for {graph.kind}", "leave one of them out")
        seen |= {graph.kind} if graph is not None else set()
    if not found:
        faults.add(root, "the file holds no graph", _DUMP_AGAIN)
    faults.raise_problems()
    return tuple(graph for graph in found if graph is not None)


def write_nccl_graphs(graphs: tuple[NcclSearchGraph, ...]) -> str:
    """Return the graphs as a file for `NCCL_GRAPH_FILE`."""
    lines = ['<graphs version="1">']
    for graph in graphs:
        attributes = {
            "id": KINDS.index(graph.kind),
            "pattern": PATTERNS.index(graph.pattern) + 1,
            "crossnic": graph.cross_nic,
            "nchannels": len(graph.channels),
            "speedintra": f"{graph.intra_bytes_per_s / _GB:g}",
            "speedinter": f"{graph.inter_bytes_per_s / _GB:g}",
            "latencyinter": f"{graph.inter_latency_s * 1e6:g}",
            "typeintra": graph.type_intra,
            "typeinter": graph.type_inter,
            "samechannels": int(graph.same_channels),
        }
        head = " ".join(f'{name}="{value}"' for name, value in attributes.items())
        lines.append(f"  <graph {head}{'' if graph.channels else '/'}>")
        for channel in graph.channels:
            lines += _channel_lines(channel)
        lines += ["  </graph>"] if graph.channels else []
    return "\n".join([*lines, "</graphs>", ""])


def _channel_lines(channel: NcclGraphChannel) -> list[str]:
    # NCCL reads device numbers in base 16, whatever they look like.
    entry = [] if channel.entry_nic is None else [f'      <net dev="{channel.entry_nic:#x}"/>']
    leave = [] if channel.exit_nic is None else [f'      <net dev="{channel.exit_nic:#x}"/>']
    gpus = [
        f'      <gpu dev="{gpu.device:#x}"'
        + ("" if gpu.rank is None else f' rank="{gpu.rank}"')
        + "/>"
        for gpu in channel.gpus
    ]
    return ["    <channel>", *entry, *gpus, *leave, "    </channel>"]


def _graph(element: XmlElement, faults: XmlProblems) -> NcclSearchGraph | None:
    before = len(faults.problems)
    number = _whole(element, "id", faults)
    pattern = _whole(element, "pattern", faults)
    if number is not None and number >= len(KINDS):
        fix = f"use 0 to {len(KINDS) - 1}: {', '.join(KINDS)}"
        faults.add(element, f"no graph has the id {number}", fix)
    if pattern is not None and not 1 <= pattern <= len(PATTERNS):
        fix = f"use 1 to {len(PATTERNS)}: {', '.join(PATTERNS)}"
        faults.add(element, f"no pattern has the number {pattern}", fix)
    for name in ("typeintra", "typeinter"):
        if element.get(name) not in PATH_TYPES:
            what = f"{name} {format_value(element.get(name))} is not a type of path"
            faults.add(element, what, format_suggestion(element.get(name), PATH_TYPES))
    channels = [_channel(channel, faults) for channel in element.find_all("channel")]
    announced = _whole(element, "nchannels", faults)
    if announced is not None and announced != len(channels):
        what = f"nchannels says {announced}, but {len(channels)} are listed"
        faults.add(element, what, f'write nchannels="{len(channels)}"')
    rates = [faults.number(element, name, 0.0) for name in ("speedintra", "speedinter")]
    latency_us = faults.number(element, "latencyinter", 0.0)
    cross_nic = _whole(element, "crossnic", faults)
    if len(faults.problems) > before or number is None or pattern is None:
        return None
    try:
        return NcclSearchGraph(
            kind=KINDS[number],  # type: ignore[arg-type]
            pattern=PATTERNS[pattern - 1],  # type: ignore[arg-type]
            cross_nic=cross_nic or 0,
            intra_bytes_per_s=rates[0] * _GB,
            inter_bytes_per_s=rates[1] * _GB,
            inter_latency_s=latency_us * 1e-6,
            type_intra=element.get("typeintra"),  # type: ignore[arg-type]
            type_inter=element.get("typeinter"),  # type: ignore[arg-type]
            same_channels=element.get("samechannels") != "0",
            channels=tuple(channels),
        )
    except InputError as error:
        listed = element.find_all("channel")
        for problem in error.problems:
            index = problem.where.removeprefix("channels[").removesuffix("]")
            line = listed[int(index)] if index.isdecimal() else element
            faults.add(line, problem.what, problem.fix)
        return None


def _channel(element: XmlElement, faults: XmlProblems) -> NcclGraphChannel:
    gpus: list[NcclGraphGpu] = []
    cards: list[int] = []
    for child in element.find_all("net", "gpu"):
        device = _device(child, faults)
        if child.tag == "net":
            cards.append(device)
        else:
            rank = _whole(child, "rank", faults) if child.get("rank") else None
            gpus.append(NcclGraphGpu(device=device, rank=rank))
    if len(cards) not in (0, 2):
        what = f"a channel has {len(cards)} <net>, not one to come in by and one to leave by"
        faults.add(element, what, "write two, or none for a single node")
    entry, leave = cards if len(cards) == 2 else (None, None)
    return NcclGraphChannel(gpus=tuple(gpus), entry_nic=entry, exit_nic=leave)


def _channel_faults(
    kind: str, channel: NcclGraphChannel, first: NcclGraphChannel
) -> list[tuple[str, str]]:
    """Say why NCCL would hang or fail on a channel: a GPU missing, named twice, cards unlike."""
    devices = [gpu.device for gpu in channel.gpus]
    found = []
    if not devices:
        found.append(("the channel names no GPU", "name every GPU of the node once"))
    if len(set(devices)) != len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        found.append((f"GPU {twice:#x} is named twice", "name every GPU of the node once"))
    elif kind != "nvls" and set(devices) != {gpu.device for gpu in first.gpus}:
        fix = "name the same GPUs in every channel, in any order"
        found.append(("the channel's GPUs are not those of the first channel", fix))
    if (channel.entry_nic is None) != (channel.exit_nic is None):
        found.append(("data comes in by a NIC but does not leave by one", "name both or none"))
    elif (channel.entry_nic is None) != (first.entry_nic is None):
        found.append(("some channels have NICs and some have none", "name NICs in all or none"))
    return found


def _device(element: XmlElement, faults: XmlProblems) -> int:
    """Return a device number: base 16 with its 0x since NCCL 2.21, decimal before."""
    text = element.get("dev").strip().lower()
    try:
        number = int(text, 16 if text.startswith("0x") else 10)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 63:
        what = f"dev {format_value(element.get('dev'))} of <{element.tag}> is not a device number"
        faults.add(element, what, 'write one, such as dev="0x3"')
        return 0
    return number


def _whole(element: XmlElement, name: str, faults: XmlProblems) -> int | None:
    text = element.get(name).strip()
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    what = f"{name} {format_value(text)} of <{element.tag}> is not a whole number from 0 up"
    faults.add(element, what, f'write a number, such as {name}="0"')
    return None
