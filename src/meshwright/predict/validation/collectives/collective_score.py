"""Score predicted collectives against published measurements: one result per row, none dropped."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.network import Placement
from meshwright.predict.network.link_corrections import get_link_kinds
from meshwright.predict.validation.collectives.row_fields import UnreadableRowError
from meshwright.predict.validation.collectives.row_prediction import (
    PredictionMethod,
    normalize_op,
    predict_row,
)
from meshwright.predict.validation.collectives.row_system import read_system
from meshwright.predict.validation.collectives.sweep_rows import Row


class ScoredCollective(msgspec.Struct, frozen=True, kw_only=True):
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


def score_collectives(
    rows: Iterable[Any], by: PredictionMethod = "formula"
) -> list[ScoredCollective]:
    """Return one scored row per row, in order."""
    return [score_collective(row, index, by) for index, row in enumerate(rows)]


def score_collective(
    row: Any, index: int = 0, by: PredictionMethod = "formula"
) -> ScoredCollective:
    """Predict one row; a row that cannot be predicted says why."""
    if not isinstance(row, Mapping):
        what = f"{row!r:.40} is no row: a row is an object with gpu, collective, size_bytes, …"
        return ScoredCollective(row=index, system="", collective="", size_bytes=None, skipped=what)
    size = row.get("size_bytes")
    name = str(row.get("collective") or "")
    plain = ScoredCollective(
        row=index,
        system=str(row.get("system") or ""),
        collective=normalize_op(name) or name,
        size_bytes=size if isinstance(size, int | float) else None,
    )
    try:
        return _predicted(plain, row, by)
    except UnreadableRowError as unreadable:
        reason = str(unreadable)
    except InputError as error:
        reason = str(error.problems[0])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"the row garbles a field: {error}"
    return replace(plain, skipped=reason)


def _predicted(plain: ScoredCollective, row: Row, by: PredictionMethod) -> ScoredCollective:
    found = read_system(row)
    price = predict_row(row, found.placement, by)
    time_us = price.measured_us
    return replace(
        plain,
        fabric=fabric_name(found.placement),
        predicted_us=price.predicted_us,
        measured_us=time_us,
        error=None if time_us is None else price.predicted_us / time_us - 1,
        algorithm=price.algorithm,
        protocol=price.protocol,
        assumed=(*found.assumed, *price.assumed),
    )


def fabric_name(place: Placement) -> str:
    """Return the kind of link that a group's collectives are bound by."""
    inside, between = get_link_kinds(place)
    return inside if place.domains == 1 else between
