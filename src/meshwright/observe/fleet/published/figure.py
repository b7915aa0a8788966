"""A figure of ours, and the words by which it is told beside a published one."""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Basis(IntEnum):
    """What a figure rests on; of two the smaller one counts."""

    TRACE = 0
    """The data that the published figure is of."""
    FIGURES = 1
    """Other figures that were published with it."""
    OTHER = 2
    """Other data or another definition: it is shown, and not judged."""


class Doubt(NamedTuple):
    """Why a figure may differ from a published one."""

    why: str = ""
    basis: Basis = Basis.TRACE


SURE = Doubt()


class Figure(NamedTuple):
    """A statistic that was computed from data."""

    value: float
    how: str
    """Its definition in a sentence."""
    of: str
    """What it was computed from."""
    doubt: Doubt = SURE


Figures = dict[str, Figure]


def figures(
    path: str, values: Mapping[str, float], how: str, of: str, doubt: Doubt = SURE
) -> Figures:
    """Make figures of one kind; those without a value are left out."""
    return {
        f"{path}.{name}": Figure(float(value), how, of, doubt)
        for name, value in values.items()
        if not np.isnan(value)
    }


def spread(values: npt.ArrayLike) -> dict[str, float]:
    """Return the usual statistics of samples."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return {}
    return {
        "mean": float(known.mean()),
        "p50": float(np.quantile(known, 0.5)),
        "p90": float(np.quantile(known, 0.9)),
        "p99": float(np.quantile(known, 0.99)),
        "min": float(known.min()),
        "max": float(known.max()),
        "zeros": float((known == 0).mean()),
    }


def counts(words: Iterable[object]) -> dict[str, float]:
    """Count how often each word occurs."""
    found: dict[str, float] = {}
    for word in words:
        found[str(word)] = found.get(str(word), 0) + 1
    return found
