"""How long documents, prompts and answers are: distributions over whole token counts.

Each kind gives moments in closed form (or one sum), quantiles, and samples that depend only on the
`random.Random` handed in. Nothing here knows what the lengths are used for.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise
from random import Random

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import check_integer, check_number, raise_problems

MAX_TOKENS = 10**9
"""Most tokens of one document, sequence, prompt or answer."""

MAX_IN_FLIGHT = 10**6
"""Most requests that a closed loop keeps running."""


class _Distribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every distribution of lengths answers."""

    def raw_moment(self, order: int, at_most: float = math.inf) -> float:
        """Return the mean of `length ** order`, lengths above `at_most` counting as nothing."""
        raise NotImplementedError

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least `share` of all lengths do not exceed."""
        raise NotImplementedError

    def sample(self, rng: Random, count: int) -> list[int]:
        """Draw `count` lengths; the same generator state gives the same lengths."""
        return [self.quantile(rng.random()) for _ in range(count)]

    def mean(self) -> float:
        """Return the mean length."""
        return self.raw_moment(1)

    def second_moment(self) -> float:
        """Return the mean of the squared length, which attention cost grows with."""
        return self.raw_moment(2)

    def clipped_mean(self, limit: int) -> float:
        """Return the mean length after every length is cut off at `limit`."""
        return self.raw_moment(1, limit) + limit * (1.0 - self.raw_moment(0, limit))


class FixedLength(_Distribution, frozen=True, kw_only=True, tag="fixed", tag_field="kind"):
    """Every length is the same."""

    tokens: int
    """The length."""

    def __post_init__(self) -> None:
        raise_problems(check_integer("tokens", self.tokens))

    def raw_moment(self, order: int, at_most: float = math.inf) -> float:
        """Return the mean of `length ** order`, lengths above `at_most` counting as nothing."""
        return float(self.tokens**order) if self.tokens <= at_most else 0.0

    def quantile(self, share: float) -> int:
        """Return the length, whatever the share."""
        _check_share(share)
        return self.tokens

    def sample(self, rng: Random, count: int) -> list[int]:  # noqa: ARG002
        """Return `count` times the length; the generator is left as it was."""
        return [self.tokens] * count


class UniformLength(_Distribution, frozen=True, kw_only=True, tag="uniform", tag_field="kind"):
    """Every whole length from `low` to `high`, both included, is equally likely."""

    low: int
    """The shortest length."""
    high: int
    """The longest length."""

    def __post_init__(self) -> None:
        raise_problems(check_integer("low", self.low), check_integer("high", self.high))
        if self.low > self.high:
            what = f"{self.low} is above high = {self.high}"
            raise InputError([Problem("low", what, f"use low={self.high}, high={self.low}")])

    def raw_moment(self, order: int, at_most: float = math.inf) -> float:
        """Return the mean of `length ** order`, lengths above `at_most` counting as nothing."""
        top = self.high if at_most >= self.high else math.floor(at_most)
        if top < self.low:
            return 0.0
        total = _power_sum(top, order) - _power_sum(self.low - 1, order)
        return total / (self.high - self.low + 1)

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least `share` of all lengths do not exceed."""
        _check_share(share)
        count = self.high - self.low + 1
        return self.low + max(0, min(count, math.ceil(share * count)) - 1)

    def sample(self, rng: Random, count: int) -> list[int]:
        """Draw `count` lengths; the same generator state gives the same lengths."""
        width, low, draw = self.high - self.low + 1, self.low, rng.random
        return [low + int(draw() * width) for _ in range(count)]


class LogNormalLength(_Distribution, frozen=True, kw_only=True, tag="lognormal", tag_field="kind"):
    """Lengths whose logarithm is normal: many short ones and a long tail, as text often has.

    Samples and quantiles are rounded to whole tokens and held between 1 and `longest`; the moments
    are those of the held, unrounded lengths (apart by well under one token).
    """

    median: float
    """The length that half of all lengths stay below."""
    sigma: float
    """Standard deviation of the natural logarithm: 1 spreads two thirds over median / e … × e."""
    longest: int = MAX_TOKENS
    """Longer lengths are cut to this."""

    def __post_init__(self) -> None:
        # Beyond sigma 5 the third moment of the longest lengths leaves what a float can hold.
        raise_problems(
            check_number("median", self.median, 1, MAX_TOKENS),
            check_number("sigma", self.sigma, 0, 5),
            check_integer("longest", self.longest),
        )

    def raw_moment(self, order: int, at_most: float = math.inf) -> float:
        """Return the mean of `length ** order`, lengths above `at_most` counting as nothing."""
        if at_most < 1:
            return 0.0
        total = self._below(1.0)  # everything shorter than a token is one token
        top = min(at_most, float(self.longest))
        total += self._partial(order, top) - self._partial(order, 1.0)
        if at_most >= self.longest:
            total += (1.0 - self._below(self.longest)) * float(self.longest) ** order
        return total

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least `share` of all lengths do not exceed."""
        _check_share(share)
        if share in (0.0, 1.0):
            edge = 1 if share == 0.0 else self.longest
            return edge if self.sigma > 0 else self._whole(self.median)
        from statistics import NormalDist  # 10 ms cold: it brings decimal and fractions

        return self._whole(self.median * math.exp(self.sigma * NormalDist().inv_cdf(share)))

    def sample(self, rng: Random, count: int) -> list[int]:
        """Draw `count` lengths; the same generator state gives the same lengths."""
        # A share of exactly 0 has no normal quantile; gauss() needs none and is twice as fast.
        draw, fix, median, sigma = rng.gauss, self._whole, self.median, self.sigma
        return [fix(median * math.exp(sigma * draw(0.0, 1.0))) for _ in range(count)]

    def _whole(self, length: float) -> int:
        return max(1, min(self.longest, round(length)))

    def _below(self, limit: float) -> float:
        return self._partial(0, limit)

    def _partial(self, order: int, limit: float) -> float:
        """Mean of `length ** order` over lengths up to `limit`, before any holding."""
        if self.sigma == 0:
            return self.median**order if self.median <= limit else 0.0
        scale = self.median**order * math.exp((order * self.sigma) ** 2 / 2)
        deviate = math.log(limit / self.median) / self.sigma - order * self.sigma
        return scale * math.erfc(-deviate / math.sqrt(2)) / 2


class EmpiricalLength(_Distribution, frozen=True, kw_only=True, tag="empirical", tag_field="kind"):
    """A histogram: the lengths that occur, and how often each does."""

    values: tuple[int, ...]
    """The lengths, strictly rising."""
    weights: tuple[float, ...]
    """How often each occurs, in any unit."""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.weights) or not self.values:
            what = f"{len(self.weights)} weights for {len(self.values)} values"
            raise InputError([Problem("weights", what, "give one weight for each value")])
        raise_problems(
            *(
                check_integer(f"values[{at}]", value, least=0)
                for at, value in enumerate(self.values)
            ),
            *(
                check_number(f"weights[{at}]", w, 0, MAX_WEIGHT)
                for at, w in enumerate(self.weights)
            ),
        )
        if any(left >= right for left, right in pairwise(self.values)):
            raise InputError([Problem("values", "are not strictly rising", "sort and merge them")])
        if max(self.weights) < MIN_WEIGHT:
            what = "are all close to zero"
            raise InputError([Problem("weights", what, f"give one at least {MIN_WEIGHT:g}")])

    def raw_moment(self, order: int, at_most: float = math.inf) -> float:
        """Return the mean of `length ** order`, lengths above `at_most` counting as nothing."""
        pairs = zip(self.values, self.weights, strict=True)
        total = math.fsum(value**order * weight for value, weight in pairs if value <= at_most)
        return total / math.fsum(self.weights)

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least `share` of all lengths do not exceed."""
        _check_share(share)
        return self._at([share])[0]

    def sample(self, rng: Random, count: int) -> list[int]:
        """Draw `count` lengths; the same generator state gives the same lengths."""
        return self._at(rng.random() for _ in range(count))

    def _at(self, shares: Iterable[float]) -> list[int]:
        steps = list(accumulate(self.weights))
        values, total = self.values, steps[-1]
        # Weights of zero at the ends must never be drawn, not even by a share of 0 or 1.
        first, last = bisect_left(steps, 1e-300), bisect_left(steps, total)
        return [
            values[min(last, max(first, bisect_left(steps, share * total)))] for share in shares
        ]


MAX_WEIGHT = 1e15
"""The largest weight of one length."""

MIN_WEIGHT = 1e-15
"""The heaviest length weighs at least this."""

Lengths = FixedLength | UniformLength | LogNormalLength | EmpiricalLength
"""Any distribution of lengths."""


def fit_empirical_length(lengths: Iterable[int]) -> EmpiricalLength:
    """Return the distribution in which each length is as frequent as among `lengths`."""
    counts = sorted(Counter(lengths).items())
    return EmpiricalLength(
        values=tuple(value for value, _ in counts),
        weights=tuple(float(count) for _, count in counts),
    )


def _check_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        what = f"{share!r} is not between 0 and 1"
        raise InputError([Problem("share", what, "0.5 gives the median")])


def _power_sum(top: int, order: int) -> int:
    """Sum `n ** order` for n from 1 to `top` (Faulhaber)."""
    if order == 0:
        return top
    if order == 1:
        return top * (top + 1) // 2
    if order == 2:
        return top * (top + 1) * (2 * top + 1) // 6
    assert order == 3, "moments go up to the third"
    return (top * (top + 1) // 2) ** 2
