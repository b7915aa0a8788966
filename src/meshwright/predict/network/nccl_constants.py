"""NCCL's own constants, per release, as typed values. They know no cluster and no measurement.

The figures lie in `nccl_constants.toml` with their source. Microseconds and GB/s, as NCCL writes
them; the modules that use them convert.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar, get_args

import msgspec

from meshwright.errors import InputError, Problem

Algorithm = Literal["tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
Protocol = Literal["ll", "ll128", "simple"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
DEFAULT_NCCL = "2.27"

V = TypeVar("V")
PerProtocol = tuple[float, float, float]
ByAlgorithm = dict[str, PerProtocol]
ByGeneration = tuple[PerProtocol, PerProtocol, PerProtocol, PerProtocol]


class ProtocolCaps(msgspec.Struct, frozen=True, kw_only=True):
    """What NCCL allows a protocol at most: rows Volta to Blackwell, columns 1, 2, 3+ nodes."""

    ll_max: ByGeneration
    """All channels of the LL protocol together; across nodes row 0 is Intel, row 1 AMD."""
    ring_ll128: ByGeneration
    """One channel of a ring with LL128."""
    tree_ll128: ByGeneration
    """One channel of a tree with LL128."""
    tree: ByGeneration
    """One channel of a tree, any protocol."""
    nvls_tree: ByGeneration
    """One channel of NVLS between nodes."""
    nvls_efficiency: tuple[float, float, float, float]
    """Share of the links' bandwidth that NVLS reaches."""


class NcclRelease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants of one NCCL release and those after it that kept them."""

    version: str
    ring_ll_share: float
    """Share of the bus that a ring with LL reaches."""
    net_peer: Literal["two", "by-speed"]
    """Channels to one peer over the network: two, or as many as its card needs."""
    nvls_model: Literal["five-sixths", "efficiency"]
    """How the release turns links into NVLS bandwidth."""
    speeds_intra: dict[str, tuple[float, ...]]
    """GB/s per channel that the search tries inside a node, by compute capability."""
    speeds_inter: dict[str, tuple[float, ...]]
    """GB/s per channel that the search tries between nodes, by compute capability."""
    nvls_channels: dict[str, int]
    """Channels of NVLS kernels."""
    base_us: ByAlgorithm
    """Latency of the algorithm before any hop."""
    nvlink_us: ByAlgorithm
    """One hop over NVLink."""
    pci_us: ByAlgorithm
    """One hop over PCIe."""
    net_us: ByAlgorithm
    """One hop over a network."""
    caps: ProtocolCaps


class NcclFixedConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants that no release has changed."""

    tree_correction: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    ring_plateau: tuple[float, float]
    ring_plateau_bytes: int
    net_overhead_us: dict[str, float]
    net_overhead_simple: float
    thread_threshold: tuple[int, int, int]
    threads: tuple[int, int, int]
    max_channels: int
    max_ring_channels: int
    max_nvls_heads: int
    nvlink: dict[str, tuple[float, float]]
    pcie: tuple[tuple[float, float], ...]


@cache
def get_fixed_constants() -> NcclFixedConstants:
    """Return the constants that hold for every release."""
    return msgspec.convert(_file()["fixed"], NcclFixedConstants)


@cache
def get_release(version: str = DEFAULT_NCCL) -> NcclRelease:
    """Return the constants of an NCCL version: those of the newest known release up to it."""
    wanted = _number(version)
    known = _releases()
    fitting = [table for number, table in known if number <= wanted]
    return fitting[-1] if fitting else known[0][1]


@cache
def _releases() -> list[tuple[tuple[int, int], NcclRelease]]:
    tables: list[tuple[tuple[int, int], NcclRelease]] = []
    merged: dict[str, Any] = {}
    for changes in _file()["release"]:
        merged = _over(merged, changes)
        table = msgspec.convert(merged, NcclRelease)
        tables.append((_number(table.version), table))
    return tables


def _over(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` with the entries of `new` put over it, table by table."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            result[key] = _over(before, value)
        else:
            result[key] = value
    return result


def _number(version: str) -> tuple[int, int]:
    found = re.match(r"\s*v?(\d+)\.(\d+)", version)
    if found is None:
        fix = "write major.minor, for example 2.27"
        raise InputError([Problem("nccl", f"{version!r} is not an NCCL version", fix)])
    return int(found[1]), int(found[2])


@cache
def _file() -> dict[str, Any]:
    text = files("meshwright.predict.network").joinpath("nccl_constants.toml")
    return tomllib.loads(text.read_text(encoding="utf-8"))


def parse_sm(arch: str) -> int | None:
    """Return 90 for `sm_90`; None for a device that is not NVIDIA's."""
    found = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return None if found is None else int(found[1])


def get_generation_row(sm: int) -> int:
    """Return the row of NCCL's tables: 0 Volta, 1 Ampere, 2 Hopper, 3 Blackwell."""
    return 3 if sm >= 100 else 2 if sm >= 90 else 1 if sm >= 80 else 0


def look_up_by_sm(table: Mapping[str, V], sm: int) -> V:
    """Return the entry of the newest compute capability up to `sm`."""
    known = sorted(int(name.removeprefix("sm_")) for name in table if name[3:].isdigit())
    fitting = [number for number in known if number <= sm] or known[:1]
    return table[f"sm_{fitting[-1]}"]
