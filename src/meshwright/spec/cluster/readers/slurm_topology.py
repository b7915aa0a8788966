"""Read Slurm's `topology.conf` into a `SwitchTree`: which nodes hang below which switches.

It takes both plugins' lines, `SwitchName=` (topology/tree) and `BlockName=` (topology/block, where
a block is a set of nodes with fast links, such as one NVL72 rack). Slurm knows no bandwidths, so a
`Fabric` made from a tree has those of its caller.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster.cluster_components import Fabric, FabricKind, SwitchTier
from meshwright.spec.cluster.hostlist import expand_hostlist
from meshwright.spec.name_suggestions import build_unknown_name_problem, format_suggestion
from meshwright.spec.serialization import format_value

# Possessive, and from a word's begin: a long line of something else takes time in proportion.
_PAIR = re.compile(r"(?<!\w)(\w++)\s*+=\s*+(\S+)")
_KEYS = {
    "switchname": {"switchname", "nodes", "switches", "linkspeed"},
    "blockname": {"blockname", "nodes"},
    "blocksizes": {"blocksizes"},
}
_MOST_LAYERS = 16
_LAYERS = ("leaf", "spine", "core", "super-core")


class SlurmSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One switch with what hangs directly below it."""

    name: str
    """Unique in its tree."""
    nodes: tuple[str, ...] = ()
    """Nodes plugged into it; a switch has nodes or switches."""
    switches: tuple[str, ...] = ()
    """Switches below it."""
    link_speed: str = ""
    """What the file says of the speed of its links; Slurm gives the text no meaning."""


class SlurmBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of nodes that fast links join."""

    name: str
    """Unique in its file."""
    nodes: tuple[str, ...]
    """Nodes of the block."""


class SwitchTree(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The nodes of a cluster as Slurm sees their network."""

    switches: tuple[SlurmSwitch, ...] = ()
    """Every switch, in the order of the file."""
    blocks: tuple[SlurmBlock, ...] = ()
    """Every block, in the order of the file."""
    block_sizes: tuple[int, ...] = ()
    """Block counts that may be put together for one job."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node once: switch by switch, or block by block where there are no switches."""
        groups = self.leaves if self.switches else self.blocks
        return tuple(dict.fromkeys(node for group in groups for node in group.nodes))

    @property
    def leaves(self) -> tuple[SlurmSwitch, ...]:
        """The switches that nodes are plugged into, from the left of the tree to the right."""
        by_name = {switch.name: switch for switch in self.switches}
        found: dict[str, SlurmSwitch] = {}
        waiting = [by_name[name] for name in reversed(self.roots)]
        while waiting:
            switch = waiting.pop()
            if switch.nodes:
                found[switch.name] = switch
            waiting.extend(by_name[name] for name in reversed(switch.switches))
        return tuple(found.values())

    @property
    def roots(self) -> tuple[str, ...]:
        """The switches that hang below no other."""
        below = {name for switch in self.switches for name in switch.switches}
        return tuple(switch.name for switch in self.switches if switch.name not in below)

    def levels(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Return, layer by layer from the leaves up, the nodes below each switch of the layer."""
        by_name = {switch.name: switch for switch in self.switches}
        height = _heights(by_name)
        layers: list[list[tuple[str, ...]]] = [
            [] for _ in range(max(height.values(), default=-1) + 1)
        ]
        for switch in self.switches:
            layers[height[switch.name]].append(tuple(_below(switch, by_name)))
        return tuple(tuple(layer) for layer in layers)

    def layer_between(self, a: str, b: str) -> int | None:
        """Return the lowest layer that joins two nodes (0 is the leaves); None if none does."""
        problems = [
            build_unknown_name_problem("node", name, self.nodes)
            for name in (a, b)
            if name not in self.nodes
        ]
        if problems:
            raise InputError(problems)
        for index, layer in enumerate(self.levels()):
            if any(a in nodes and b in nodes for nodes in layer):
                return index
        return None

    def to_fabric(
        self,
        kind: FabricKind,
        oversubscription: tuple[float, ...] = (),
        rail_optimised: bool = False,
    ) -> Fabric:
        """Return a fabric with this tree's layers, each as wide as its widest switch.

        `oversubscription` gives one number per layer from the leaves up; missing ones are 1.
        """
        levels = self.levels()
        if not levels:
            fix = "add SwitchName= lines, or write the fabric by hand"
            raise InputError([Problem("switches", "the topology names no switch", fix)])
        tiers: list[SwitchTier] = []
        size = 0
        for index, layer in enumerate(levels):
            widest = max(len(nodes) for nodes in layer)
            # A fabric's groups nest evenly, so an uneven tree is rounded up to one that does.
            size = widest if not size else -(-widest // size) * size
            if tiers and size == tiers[-1].nodes:
                continue
            name = _LAYERS[index] if index < len(_LAYERS) else f"layer{index}"
            ratio = oversubscription[index] if index < len(oversubscription) else 1.0
            tiers.append(SwitchTier(name=name, nodes=size, oversubscription=ratio))
        if len(levels[-1]) == 1 and len(levels[-1][0]) == len(self.nodes):
            tiers[-1] = msgspec.structs.replace(tiers[-1], nodes=None)
        return Fabric(kind=kind, tiers=tuple(tiers), rail_optimised=rail_optimised)


def _below(switch: SlurmSwitch, by_name: dict[str, SlurmSwitch]) -> Iterable[str]:
    seen: dict[str, None] = dict.fromkeys(switch.nodes)
    for name in switch.switches:
        seen |= dict.fromkeys(_below(by_name[name], by_name))
    return seen


def _heights(by_name: dict[str, SlurmSwitch]) -> dict[str, int]:
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            under = [height(child) for child in by_name[name].switches]
            heights[name] = 1 + max(under) if under else 0
        return heights[name]

    for name in by_name:
        height(name)
    return heights


class _Line(NamedTuple):
    where: str
    values: dict[str, str]


def read_slurm_topology(text: str, where: str = "topology.conf") -> SwitchTree:
    """Return the tree that a `topology.conf` describes."""
    problems: list[Problem] = []
    switches: dict[str, SlurmSwitch] = {}
    blocks: dict[str, SlurmBlock] = {}
    sizes: list[int] = []
    places: dict[str, str] = {}
    for line in _lines(text, where, problems):
        name = line.values.get("switchname") or line.values.get("blockname") or ""
        if name in places:
            what = f"{format_value(name)} is defined twice"
            problems.append(Problem(line.where, what, "rename one, or leave out one line"))
        if "[" in name:
            problems.append(
                Problem(line.where, f"{format_value(name)} is not one name", "one per line")
            )
        places[name] = line.where
        if "switchname" in line.values:
            switches[name] = _switch(name, line, problems)
        elif "blockname" in line.values:
            blocks[name] = SlurmBlock(name=name, nodes=_hosts(line, "nodes", problems))
        else:
            del places[name]
            sizes += _sizes(line, problems)
    if not problems:
        _check_tree(switches, places, where, problems)
    if not problems and not switches and not blocks:
        problems.append(Problem(where, "names no switch and no block", "add a SwitchName= line"))
    if problems:
        raise InputError(problems)
    return SwitchTree(
        switches=tuple(switches.values()),
        blocks=tuple(blocks.values()),
        block_sizes=tuple(sizes),
    )


def _switch(name: str, line: _Line, problems: list[Problem]) -> SlurmSwitch:
    if ("nodes" in line.values) == ("switches" in line.values):
        what = f"switch {format_value(name)} needs either Nodes= or Switches="
        fix = "say what hangs directly below it, nodes or switches"
        problems.append(Problem(line.where, what, fix))
    return SlurmSwitch(
        name=name,
        nodes=_hosts(line, "nodes", problems),
        switches=_hosts(line, "switches", problems),
        link_speed=line.values.get("linkspeed", ""),
    )


def _lines(text: str, where: str, problems: list[Problem]) -> list[_Line]:
    found: list[_Line] = []
    # A backslash at the end joins a line with the next, as everywhere in Slurm's files.
    joined = ""
    first = 1
    for number, raw in enumerate(text.splitlines(), 1):
        line = joined + raw.split("#", 1)[0].rstrip()
        first = first if joined else number
        joined = line[:-1] + " " if line.endswith("\\") else ""
        if joined or not line.strip():
            continue
        place = f"{where}: line {first}"
        values = {key.lower(): value for key, value in _PAIR.findall(line)}
        rest = _PAIR.sub("", line).strip()
        if rest:
            fix = "write it like SwitchName=leaf1 Nodes=n[01-16]"
            problems.append(Problem(place, f"{format_value(rest)} is not Key=Value", fix))
        elif _keys_fit(values, place, problems):
            found.append(_Line(place, values))
    return found


def _keys_fit(values: dict[str, str], place: str, problems: list[Problem]) -> bool:
    kind = next((key for key in _KEYS if key in values), None)
    known = set.union(*_KEYS.values()) if kind is None else _KEYS[kind]
    unknown = [key for key in values if key not in known]
    for key in unknown:
        fix = format_suggestion(key, sorted(known))
        problems.append(Problem(place, f"{key!r} is no key of such a line", fix))
    if kind is None and not unknown:
        what = "a line begins with SwitchName=, BlockName= or BlockSizes="
        problems.append(Problem(place, what, "name the switch or the block first"))
    return kind is not None and not unknown


def _hosts(line: _Line, key: str, problems: list[Problem]) -> tuple[str, ...]:
    try:
        return expand_hostlist(line.values[key], line.where) if key in line.values else ()
    except InputError as error:
        problems.extend(error.problems)
        return ()


def _sizes(line: _Line, problems: list[Problem]) -> list[int]:
    parts = line.values["blocksizes"].split(",")
    if all(re.fullmatch(r"0*[1-9]\d{0,5}", part) for part in parts):
        return [int(part) for part in parts]
    what = f"{format_value(line.values['blocksizes'])} is not a list of block sizes"
    problems.append(Problem(line.where, what, "write 4,8,16"))
    return []


def _check_tree(
    switches: dict[str, SlurmSwitch], places: dict[str, str], where: str, problems: list[Problem]
) -> None:
    for switch in switches.values():
        problems.extend(
            build_unknown_name_problem("switch", name, switches, places[switch.name])
            for name in switch.switches
            if name not in switches
        )
    # Children first: whatever never becomes free of waiting children is part of a circle.
    waiting = {name: set(switch.switches) for name, switch in switches.items()}
    layers = 0
    while ready := [name for name, children in waiting.items() if not children]:
        layers += 1
        for name in ready:
            del waiting[name]
        for children in waiting.values():
            children.difference_update(ready)
    if waiting and not problems:
        circle = format_value(", ".join(sorted(waiting)))
        what = f"switches hang below themselves: {circle}"
        problems.append(Problem(where, what, "take one of them out of the others' Switches="))
    if layers > _MOST_LAYERS:
        what = f"{layers} layers of switches are too many to be meant"
        problems.append(Problem(where, what, f"use at most {_MOST_LAYERS}"))
