"""A figure of ours, and the words by which it is told beside a published one."""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class StatisticBasis(IntEnum):
    """What a figure rests on; of two the smaller one counts."""

    TRACE = 0
    """The data that the published figure is of."""
    FIGURES = 1
    """Other figures that were published with it."""
    OTHER = 2
    """Other data or another definition: it is shown, and not judged."""


class StatisticCaveat(NamedTuple):
    """Why a figure may differ from a published one."""

    reason: str = ""
    basis: StatisticBasis = StatisticBasis.TRACE


NO_CAVEAT = StatisticCaveat()


class Statistic(NamedTuple):
    """A statistic that was computed from data."""

    value: float
    method: str
    """Its definition in a sentence."""
    source: str
    """What it was computed from."""
    caveat: StatisticCaveat = NO_CAVEAT


Statistics = dict[str, Statistic]


def make_statistics(
    path: str, values: Mapping[str, float], how: str, of: str, doubt: StatisticCaveat = NO_CAVEAT
) -> Statistics:
    """Make figures of one kind; those without a value are left out."""
    return {
        f"{path}.{name}": Statistic(float(value), how, of, doubt)
        for name, value in values.items()
        if not np.isnan(value)
    }


def summarize_samples(values: npt.ArrayLike) -> dict[str, float]:
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


def count_values(words: Iterable[object]) -> dict[str, float]:
    """Count how often each word occurs."""
    found: dict[str, float] = {}
    for word in words:
        found[str(word)] = found.get(str(word), 0) + 1
    return found
