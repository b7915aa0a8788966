"""Score predicted collectives against published measurements: one result per row, none dropped."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.network import Placement
from meshwright.predict.network.fabric import kinds
from meshwright.predict.published.collectives.fields import Unreadable
from meshwright.predict.published.collectives.operations import By, priced, spelled
from meshwright.predict.published.collectives.rows import Row
from meshwright.predict.published.collectives.systems import system


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One row of measurements with its prediction."""

    row: int
    """Index in the input."""
    system: str
    collective: str
    size_bytes: float | None
    fabric: str | None = None
    """The kind of link that bounds it: the network, or the links inside one unit."""
    predicted_us: float | None = None
    measured_us: float | None = None
    error: float | None = None
    """Predicted over measured, less one; None for a row without a usable measurement too."""
    algorithm: str | None = None
    protocol: str | None = None
    assumed: tuple[str, ...] = ()
    """What the row did not say."""
    skipped: str | None = None
    """Why there is no prediction."""


def score(rows: Iterable[Any], by: By = "formula") -> list[Scored]:
    """Return one scored row per row, in order."""
    return [score_row(row, index, by) for index, row in enumerate(rows)]


def score_row(row: Any, index: int = 0, by: By = "formula") -> Scored:
    """Predict one row; a row that cannot be predicted says why."""
    if not isinstance(row, Mapping):
        what = f"{row!r:.40} is no row: a row is an object with gpu, collective, size_bytes, …"
        return Scored(row=index, system="", collective="", size_bytes=None, skipped=what)
    size = row.get("size_bytes")
    name = str(row.get("collective") or "")
    plain = Scored(
        row=index,
        system=str(row.get("system") or ""),
        collective=spelled(name) or name,
        size_bytes=size if isinstance(size, int | float) else None,
    )
    try:
        return _predicted(plain, row, by)
    except Unreadable as unreadable:
        reason = str(unreadable)
    except InputError as error:
        reason = str(error.problems[0])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"the row garbles a field: {error}"
    return replace(plain, skipped=reason)


def _predicted(plain: Scored, row: Row, by: By) -> Scored:
    found = system(row)
    price = priced(row, found.place, by)
    time_us = price.measured_us
    return replace(
        plain,
        fabric=fabric_name(found.place),
        predicted_us=price.predicted_us,
        measured_us=time_us,
        error=None if time_us is None else price.predicted_us / time_us - 1,
        algorithm=price.algorithm,
        protocol=price.protocol,
        assumed=(*found.assumed, *price.assumed),
    )


def fabric_name(place: Placement) -> str:
    """Return the kind of link that a group's collectives are bound by."""
    inside, between = kinds(place)
    return inside if place.units == 1 else between
