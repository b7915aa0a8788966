"""What a GPU-hour costs: as the user says, or as the catalog does."""

import re
from functools import cache
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.spec import catalog


class GpuPrice(NamedTuple):
    """Dollars for an hour of a GPU."""

    dollars_per_hour: float
    source: str


class GpuPrices(NamedTuple):
    """Prices by kind of GPU."""

    default_price: GpuPrice | None = None
    """For all kinds that have none of their own."""
    by_kind: dict[str, GpuPrice] = {}  # noqa: RUF012 - never changed

    def find(self, kind: str | None) -> GpuPrice | None:
        """Return the price of a kind; None where nobody tells."""
        if kind is not None:
            # Drivers tell `NVIDIA H100 80GB HBM3` where people write `h100`; the closest counts.
            name = _plain(kind)
            fits = [one for one in self.by_kind if name == one or name.startswith(f"{one}-")]
            fits = fits or [one for one in self.by_kind if _known(one) == _known(kind) != ""]
            if fits:
                return self.by_kind[max(fits, key=len)]
        return self.default_price or (_of_catalog(kind) if kind else None)


def parse_prices(text: str | None) -> GpuPrices:
    """Read `2.5`, or `h100=2.9,a100=1.4`, or both."""
    if not text:
        return GpuPrices()
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
            by_kind[_plain(kind)] = GpuPrice(dollars, "as given")
        else:
            given = GpuPrice(dollars, "as given")
    return GpuPrices(given, by_kind)


def _plain(kind: str) -> str:
    return re.sub(r"^(nvidia|tesla)-", "", catalog.normalize_name(kind))


@cache
def _known(kind: str) -> str:
    """Return what the catalog calls a kind; nothing where it has none."""
    try:
        return catalog.get_gpu(_plain(kind)).name
    except InputError:
        return ""


@cache
def _of_catalog(kind: str) -> GpuPrice | None:
    """Return the lowest price of the catalog's clusters with that GPU."""
    name = _known(kind)
    found = [
        (cluster.price_per_gpu_hour, cluster.name)
        for cluster in catalog.list_clusters().values()
        if cluster.gpu.name == name and cluster.price_per_gpu_hour is not None
    ]
    if not found:
        return None
    dollars, cluster_name = min(found)
    return GpuPrice(dollars, f"catalog: {cluster_name}, the lowest for {name}")
