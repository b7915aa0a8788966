"""What a collective puts on the links of a cluster: the view, the data and the picture."""

import re
from typing import NamedTuple

from meshwright.cli import collective_svg
from meshwright.cli.answer import View, table
from meshwright.cli.collective_source import Target
from meshwright.cli.files import write_text
from meshwright.policy.collective import Collective
from meshwright.predict.collective import LinkLoad, Simulated, simulate
from meshwright.spec.units import format_bytes, format_seconds

_SHOWN, _DRAWN = 8, 40


class Load(NamedTuple):
    """Links of one kind that carry the same."""

    link: str
    """The first of them."""
    alike: int
    """How many there are."""
    carried_bytes: float
    busy_s: float
    utilisation: float


def link_loads(found: Collective, on: Target, nbytes: int) -> list[Load]:
    """Return what each link carries for a message, the busiest first."""
    return loads_of(simulate(found, on.cluster, nbytes))


def loads_of(result: Simulated) -> list[Load]:
    """Return the loads of a simulation, the busiest first, links alike counted together."""
    alike: dict[tuple[str, str], list[LinkLoad]] = {}
    for load in result.loads():
        kind = re.sub(r"\d+", "*", load.link)
        alike.setdefault((kind, f"{load.busy_s:.3g}"), []).append(load)
    return [
        Load(same[0].link, len(same), same[0].carried_bytes, same[0].busy_s, same[0].utilisation)
        for same in list(alike.values())[:_DRAWN]
    ]


def _name(load: Load) -> str:
    return load.link if load.alike == 1 else f"{load.link} and {load.alike - 1} more"


def loads_view(loads: list[Load]) -> View:
    """Return the busiest links as a table."""
    rows = [
        (_name(load), format_bytes(load.carried_bytes), format_seconds(load.busy_s),
         f"{load.utilisation:.0%}")
        for load in loads[:_SHOWN]
    ]  # fmt: skip
    return table(
        "link, carries, busy, of the time", rows, "links, the busiest first",
        right="carries, busy, of the time",
    )  # fmt: skip


def write_loads(path: str, found: Collective, loads: list[Load]) -> None:
    """Draw the busiest links to a file."""
    most = max((load.busy_s for load in loads), default=1.0) or 1.0
    rows = [
        collective_svg.Load(
            _name(load),
            load.busy_s / most,
            f"{format_bytes(load.carried_bytes)}, {load.utilisation:.0%} of the time",
        )
        for load in loads
    ]
    title = f"What {found.name} {found.op} puts on links"
    write_text(path, collective_svg.loads(title, rows))
