"""How the account moves from day to day, and where it goes on to, with how wrong that has been.

A forecast is one of a few plain rules. Which one is chosen by what it would have missed so far; the
error that is told is that of choosing so at each past day, with nothing of the days after it.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from meshwright.fleet.account.account import GpuHourAccount, sum_by_bucket
from meshwright.fleet.account.ticks import Floats

SEASON_DAYS: Final = 7
_LEAST = 4
"""Days that are needed before anything is forecast."""


def _weekday(past: Floats, ahead: int) -> Floats:
    season = past[-SEASON_DAYS:]
    return np.array([season[at % len(season)] for at in range(ahead)])


def _line(past: Floats, ahead: int) -> Floats:
    recent = past[-2 * SEASON_DAYS :]
    slope, level = np.polyfit(np.arange(len(recent)), recent, 1)
    return np.asarray(level + slope * (len(recent) + np.arange(ahead)))


FORECAST_RULES: Final[dict[str, Callable[[Floats, int], Floats]]] = {
    "the mean of a week": lambda past, ahead: np.full(ahead, past[-SEASON_DAYS:].mean()),
    "as the last": lambda past, ahead: np.full(ahead, past[-1]),
    "as the same day of the week": _weekday,
    "a straight line": _line,
}


class Forecast(NamedTuple):
    """What comes next, by the rule that would have erred least."""

    values: tuple[float, ...]
    rule: str
    error: float
    """By how much it was off on the average where it could be tested, in the series' own unit."""
    relative_error: float
    """The same over the mean of the series."""
    num_tests: int
    """How many past forecasts the error is of."""


def forecast(
    series: Sequence[float], ahead: int = SEASON_DAYS, low: float = 0.0, high: float = np.inf
) -> Forecast | None:
    """Go on with a series; None where it is too short to have been tested once."""
    values = np.asarray(series, np.float64)
    origins = range(_LEAST, len(values))
    if len(origins) == 0:
        return None
    missed: dict[str, list[float]] = {name: [] for name in FORECAST_RULES}
    of_choice = []
    for origin in origins:
        # Only what had been seen by then may choose: a miss is known once its days have passed.
        chosen = _best(missed)
        actual = values[origin : origin + ahead]
        for name, rule in FORECAST_RULES.items():
            guess = np.clip(rule(values[:origin], len(actual)), low, high)
            error = float(np.abs(guess - actual).mean())
            if name == chosen:
                of_choice.append(error)
            # What a rule says of the very next day is known at the next origin.
            missed[name].append(float(abs(guess[0] - actual[0])))
    chosen = _best(missed)
    mean = float(np.abs(values).mean())
    error = float(np.mean(of_choice))
    return Forecast(
        tuple(float(value) for value in np.clip(FORECAST_RULES[chosen](values, ahead), low, high)),
        chosen, error, error / mean if mean > 0 else 0.0, len(of_choice),
    )  # fmt: skip


def _best(missed: dict[str, list[float]]) -> str:
    """The rule that has erred least; the first where none has been tested."""
    return min(missed, key=lambda name: float(np.mean(missed[name])) if missed[name] else 0.0)


class TrendPoint(NamedTuple):
    """Shares of one day's or week's hours."""

    since_s: float
    until_s: float
    hours: float
    shares: dict[str, float]
    pending_hours: float


def build_trend(found: GpuHourAccount) -> tuple[TrendPoint, ...]:
    """Return the days of the account."""
    hour = 840 * 1000 * 3600
    rows = []
    for step in found.periods:
        buckets = sum_by_bucket(step.cells)
        whole = sum(buckets.values())
        rows.append(
            TrendPoint(
                step.window.since_ms / 1000, step.window.until_ms / 1000, whole / hour,
                {name: amount / whole if whole else 0.0 for name, amount in buckets.items()},
                step.pending / hour,
            )
        )  # fmt: skip
    return tuple(rows)


def select_complete_periods(found: GpuHourAccount) -> tuple[TrendPoint, ...]:
    """Return the days that are whole, or nearly, and known from their beginning on."""
    rows = [row for row in build_trend(found) if row.hours > 0]
    longest = max((row.until_s - row.since_s for row in rows), default=0.0)
    known_s = found.first_known_ms / 1000
    return tuple(row for row in rows if row.until_s - max(row.since_s, known_s) > 0.9 * longest)
