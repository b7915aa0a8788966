"""What a collective puts on the links of a cluster: the view, the data and the picture."""

from typing import NamedTuple

from meshwright.cli import collective_svg
from meshwright.cli.answer import View, table
from meshwright.cli.collective_source import Target
from meshwright.cli.files import write_text
from meshwright.policy.collective import Collective
from meshwright.predict.collective import Simulated, simulate
from meshwright.spec.units import format_bytes, format_seconds

_SHOWN, _DRAWN = 8, 40


class Load(NamedTuple):
    """One link of the cluster."""

    link: str
    carried_bytes: float
    busy_s: float
    utilisation: float


def link_loads(found: Collective, on: Target, nbytes: int) -> list[Load]:
    """Return what each link carries for a message, the busiest first."""
    return loads_of(simulate(found, on.cluster, nbytes))


def loads_of(result: Simulated, most: int | None = _DRAWN) -> list[Load]:
    """Return the loads of a simulation, the busiest first."""
    return [
        Load(load.link, load.carried_bytes, load.busy_s, load.utilisation)
        for load in result.loads(most)
    ]


def loads_view(loads: list[Load]) -> View:
    """Return the busiest links as a table."""
    rows = [
        (load.link, format_bytes(load.carried_bytes), format_seconds(load.busy_s),
         f"{load.utilisation:.0%}")
        for load in loads[:_SHOWN]
    ]  # fmt: skip
    return table(
        "link, carries, busy, of the time", rows, "the busiest links",
        right="carries, busy, of the time",
    )  # fmt: skip


def write_loads(path: str, found: Collective, loads: list[Load]) -> None:
    """Draw the busiest links to a file."""
    most = max((load.busy_s for load in loads), default=1.0) or 1.0
    rows = [
        collective_svg.Load(
            load.link,
            load.busy_s / most,
            f"{format_bytes(load.carried_bytes)}, {load.utilisation:.0%} of the time",
        )
        for load in loads
    ]
    title = f"What {found.name} {found.op} puts on the {len(rows)} busiest links"
    write_text(path, collective_svg.loads(title, rows))
