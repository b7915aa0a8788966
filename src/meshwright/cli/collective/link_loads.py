"""What a collective puts on the links of a cluster: the view, the data and the picture."""

import re
from typing import NamedTuple

from meshwright.cli.collective import schedule_svg
from meshwright.cli.collective.flags import CollectiveTarget
from meshwright.cli.render.files import write_text
from meshwright.cli.result import View, make_table
from meshwright.policy.collective import Collective
from meshwright.predict.collective import LinkLoad, SimulatedCollective, simulate_collective
from meshwright.spec.units import format_bytes, format_seconds

_SHOWN, _DRAWN = 8, 40


class LinkLoadRow(NamedTuple):
    """Links of one kind that carry the same."""

    link: str
    """The first of them."""
    num_links: int
    """How many there are."""
    carried_bytes: float
    busy_s: float
    utilization: float


def compute_link_loads(found: Collective, on: CollectiveTarget, nbytes: int) -> list[LinkLoadRow]:
    """Return what each link carries for a message, the busiest first."""
    return group_link_loads(simulate_collective(found, on.cluster, nbytes))


def group_link_loads(result: SimulatedCollective) -> list[LinkLoadRow]:
    """Return the loads of a simulation, the busiest first, links alike counted together."""
    alike: dict[tuple[str, str], list[LinkLoad]] = {}
    for load in result.list_link_loads():
        kind = re.sub(r"\d+", "*", load.link)
        alike.setdefault((kind, f"{load.busy_s:.3g}"), []).append(load)
    return [
        LinkLoadRow(
            same[0].link, len(same), same[0].carried_bytes, same[0].busy_s, same[0].utilization
        )
        for same in list(alike.values())[:_DRAWN]
    ]


def _name(load: LinkLoadRow) -> str:
    return load.link if load.num_links == 1 else f"{load.link} and {load.num_links - 1} more"


def render_link_loads(loads: list[LinkLoadRow]) -> View:
    """Return the busiest links as a table."""
    rows = [
        (_name(load), format_bytes(load.carried_bytes), format_seconds(load.busy_s),
         f"{load.utilization:.0%}")
        for load in loads[:_SHOWN]
    ]  # fmt: skip
    return make_table(
        "link, carries, busy, of the time", rows, "links, the busiest first",
        right="carries, busy, of the time",
    )  # fmt: skip


def write_link_loads(path: str, found: Collective, loads: list[LinkLoadRow]) -> None:
    """Draw the busiest links to a file."""
    most = max((load.busy_s for load in loads), default=1.0) or 1.0
    rows = [
        schedule_svg.LinkLoadBar(
            _name(load),
            load.busy_s / most,
            f"{format_bytes(load.carried_bytes)}, {load.utilization:.0%} of the time",
        )
        for load in loads
    ]
    title = f"What {found.name} {found.op} puts on links"
    write_text(path, schedule_svg.draw_link_loads(title, rows))
