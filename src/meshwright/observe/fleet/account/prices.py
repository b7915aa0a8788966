"""What a GPU-hour costs: as the user says, or as the catalog does."""

import re
from functools import cache
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.spec import catalog


class Price(NamedTuple):
    """Dollars for an hour of a GPU."""

    dollars: float
    source: str


class Prices(NamedTuple):
    """Prices by kind of GPU."""

    given: Price | None = None
    """For all kinds that have none of their own."""
    by_kind: dict[str, Price] = {}  # noqa: RUF012 - never changed

    def of(self, kind: str | None) -> Price | None:
        """Return the price of a kind; None where nobody tells."""
        if kind is not None:
            # Drivers tell `NVIDIA H100 80GB HBM3` where people write `h100`; the closest counts.
            name = _plain(kind)
            fits = [one for one in self.by_kind if name == one or name.startswith(f"{one}-")]
            fits = fits or [one for one in self.by_kind if _known(one) == _known(kind) != ""]
            if fits:
                return self.by_kind[max(fits, key=len)]
        return self.given or (_of_catalog(kind) if kind else None)


def read_prices(text: str | None) -> Prices:
    """Read `2.5`, or `h100=2.9,a100=1.4`, or both."""
    if not text:
        return Prices()
    given, by_kind = None, {}
    for part in text.split(","):
        kind, _, number = part.rpartition("=")
        try:
            dollars = float(number)
        except ValueError:
            dollars = -1.0
        if not 0 <= dollars < 1e6:
            fix = "write dollars per GPU-hour: --price 2.5, or --price h100=2.9,a100=1.4"
            raise InputError([Problem("--price", f"{part.strip()!r} is no price", fix)])
        if kind.strip():
            by_kind[_plain(kind)] = Price(dollars, "as given")
        else:
            given = Price(dollars, "as given")
    return Prices(given, by_kind)


def _plain(kind: str) -> str:
    return re.sub(r"^(nvidia|tesla)-", "", catalog.plain_name(kind))


@cache
def _known(kind: str) -> str:
    """Return what the catalog calls a kind; nothing where it has none."""
    try:
        return catalog.gpu(_plain(kind)).name
    except InputError:
        return ""


@cache
def _of_catalog(kind: str) -> Price | None:
    """Return the lowest price of the catalog's clusters with that GPU."""
    name = _known(kind)
    found = [
        (cluster.price_per_gpu_hour, cluster.name)
        for cluster in catalog.clusters().values()
        if cluster.gpu.name == name and cluster.price_per_gpu_hour is not None
    ]
    if not found:
        return None
    dollars, cluster_name = min(found)
    return Price(dollars, f"catalog: {cluster_name}, the lowest for {name}")
