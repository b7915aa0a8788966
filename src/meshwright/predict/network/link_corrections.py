"""What measurements add to NCCL's cost model: two constants per kind of link.

The figures lie in `fabrics.toml`, written by the fit in `validation/collectives`. This module knows
kinds of links, no collective.
"""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from meshwright.predict.network.placement import ClusterLinks, Placement

DelayScope = Literal["call", "hop", "message"]


class LinkCorrection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one kind of link differs from what NCCL counts."""

    delay_us: float
    """Microseconds that NCCL does not count."""
    per: DelayScope
    """Where they fall: once per call, on each hop between units, or on each message posted."""
    efficiency: float
    """Bandwidth reached over the bandwidth that NCCL counts."""
    rows: int = 0
    """Measurements behind the two; 0 where none were found."""
    like: str = ""
    """The kind whose figures stand in where none were found."""


@cache
def load_corrections() -> dict[str, LinkCorrection]:
    """Return every kind of link by name."""
    text = files("meshwright.predict.network").joinpath("fabrics.toml")
    tables = tomllib.loads(text.read_text(encoding="utf-8"))
    found = {}
    for name, table in tables.items():
        other = table.get("like", "")
        figures = {**tables[other], "rows": 0, "like": other} if other else table
        found[name] = msgspec.convert(figures, LinkCorrection)
    return found


def get_scale_up_kind(links: ClusterLinks) -> str:
    """Return the name under which a fast link is corrected: NVLink by its generation."""
    if links.scale_up != "nvlink":
        return links.scale_up
    if links.sm >= 100:
        return "nvlink5"
    return "nvlink4" if links.sm >= 90 else "nvlink3" if links.sm >= 80 else "nvlink2"


def get_link_kinds(place: Placement) -> tuple[str, str]:
    """Return what joins the ranks of a unit, and the units, of a group."""
    inside = "pcie" if place.intra_link == "host" else get_scale_up_kind(place.links)
    return inside, place.links.fabric
