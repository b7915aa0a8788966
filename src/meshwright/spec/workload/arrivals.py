"""When requests arrive: open streams with a rate, given times, or a fixed number in flight.

Open streams are renewal processes: independent gaps with a mean of `1 / rate_per_s`. Nothing here
knows what a request holds.
"""

from collections.abc import Iterator
from itertools import accumulate, count, pairwise, repeat
from random import Random

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import check_integer, check_number, raise_problems
from meshwright.spec.workload.lengths import MAX_IN_FLIGHT


class _Arrivals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every arrival process answers."""

    def times_s(self, rng: Random) -> Iterator[float]:
        """Yield arrival times in seconds, rising; the same generator state gives the same times."""
        raise NotImplementedError


def _rate(value: object) -> list[Problem]:
    return check_number("rate_per_s", value, 1e-9, 1e9)


class ConstantArrivals(_Arrivals, frozen=True, kw_only=True, tag="constant", tag_field="kind"):
    """Requests arrive at equal distances, the first at once."""

    rate_per_s: float
    """Requests per second."""

    def __post_init__(self) -> None:
        raise_problems(_rate(self.rate_per_s))

    def times_s(self, rng: Random) -> Iterator[float]:  # noqa: ARG002
        """Yield arrival times in seconds, without end."""
        rate = self.rate_per_s
        return (number / rate for number in count())


class PoissonArrivals(_Arrivals, frozen=True, kw_only=True, tag="poisson", tag_field="kind"):
    """Requests arrive independently of each other: exponential gaps, a variation of 1."""

    rate_per_s: float
    """Requests per second."""

    def __post_init__(self) -> None:
        raise_problems(_rate(self.rate_per_s))

    def times_s(self, rng: Random) -> Iterator[float]:
        """Yield arrival times in seconds, without end."""
        draw, rate = rng.expovariate, self.rate_per_s
        return accumulate(draw(rate) for _ in repeat(None))


class GammaArrivals(_Arrivals, frozen=True, kw_only=True, tag="gamma", tag_field="kind"):
    """Requests arrive in bursts (variation above 1) or more evenly than chance (below 1)."""

    rate_per_s: float
    """Requests per second."""
    cv: float
    """Coefficient of variation of the gaps: their standard deviation over their mean."""

    def __post_init__(self) -> None:
        raise_problems(_rate(self.rate_per_s), check_number("cv", self.cv, 0.01, 100))

    def times_s(self, rng: Random) -> Iterator[float]:
        """Yield arrival times in seconds, without end."""
        shape = 1 / self.cv**2
        scale = 1 / (self.rate_per_s * shape)
        draw = rng.gammavariate
        return accumulate(draw(shape, scale) for _ in repeat(None))


class RecordedArrivals(_Arrivals, frozen=True, kw_only=True, tag="times", tag_field="kind"):
    """Requests arrive at given times."""

    at_s: tuple[float, ...]
    """Seconds since the start, never falling."""

    def __post_init__(self) -> None:
        if not self.at_s:
            raise InputError([Problem("at_s", "holds no time", "give at least one")])
        raise_problems(
            *(check_number(f"at_s[{place}]", time, 0, 1e12) for place, time in enumerate(self.at_s))
        )
        for place, (before, after) in enumerate(pairwise(self.at_s)):
            if after < before:
                what = f"{after} comes after {before}"
                raise InputError([Problem(f"at_s[{place + 1}]", what, "sort the times")])

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second from the first to the last; None where all come at once."""
        span = self.at_s[-1] - self.at_s[0]
        return (len(self.at_s) - 1) / span if span > 0 else None

    def times_s(self, rng: Random) -> Iterator[float]:  # noqa: ARG002
        """Yield the given times."""
        return iter(self.at_s)


class FixedConcurrency(_Arrivals, frozen=True, kw_only=True, tag="concurrency", tag_field="kind"):
    """A fixed number of requests is in flight: the next one starts when one ends."""

    in_flight: int
    """Requests that run at the same time."""

    def __post_init__(self) -> None:
        raise_problems(check_integer("in_flight", self.in_flight, most=MAX_IN_FLIGHT))

    @property
    def rate_per_s(self) -> None:
        """Unknown: it depends on how fast requests are served."""
        return None

    def times_s(self, rng: Random) -> Iterator[float]:  # noqa: ARG002
        """Yield zeros without end: every request is ready, and waits for its turn."""
        return repeat(0.0)


Arrivals = ConstantArrivals | PoissonArrivals | GammaArrivals | RecordedArrivals | FixedConcurrency
"""Any arrival process."""
