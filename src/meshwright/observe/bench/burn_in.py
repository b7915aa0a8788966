"""Burn-in: products under load for minutes; their bits must not change, nor their pace fall.

The same product of the same operands has the same bits every time, as the same kernel adds in the
same order; one element that differs is a fault of the device. Several sets of operands lie spread
over memory. What a GPU does in each stretch of time is held against its first stretches, after it
has warmed up.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from meshwright.observe.bench.case import Telemetry
from meshwright.observe.bench.family import Place
from meshwright.observe.bench.health import ALARMS
from meshwright.observe.bench.telemetry import Sampler

if TYPE_CHECKING:
    import torch

STRETCH_S = 5.0
SIDE = {"cuda": 8192, "cpu": 512}
SETS = 8
WARM = 2
"""Stretches that only warm the device."""
SLOWER = 0.10
"""A stretch that is so much slower than those at the beginning is a fault."""


class Stretch(NamedTuple):
    """What was done in some seconds."""

    began_s: float
    products: int
    flops_per_s: float
    wrong: int
    """Elements that were not what they had been."""
    telemetry: Telemetry | None = None


Multiply = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def burn_in(
    place: Place, seconds: float, *, stretch_s: float = STRETCH_S, multiply: Multiply | None = None
) -> Iterator[Stretch]:
    """Yield stretches until the time is over."""
    import torch

    side = SIDE[place.device.type]
    format_ = torch.bfloat16 if place.on_gpu else torch.float32
    product = multiply or torch.mm
    sets = [
        tuple(torch.randn(side, side, device=place.device).to(format_) for _ in range(2))
        for _ in range(SETS)
    ]
    right = [product(first, second) for first, second in sets]
    begun = time.perf_counter()
    while (at := time.perf_counter() - begun) < seconds:
        wrong = torch.zeros((), dtype=torch.int64, device=place.device)
        done = 0
        with _sampler(place) as sampler:
            end = time.perf_counter() + min(stretch_s, seconds - at)
            while done == 0 or time.perf_counter() < end:
                for (first, second), known in zip(sets, right, strict=True):
                    wrong += (product(first, second) != known).sum()
                done += SETS
                if place.on_gpu:
                    torch.cuda.synchronize(place.device)
            found = int(wrong.item())
        took_s = time.perf_counter() - begun - at
        telemetry = None if sampler is None else sampler.telemetry()
        yield Stretch(at, done, done * 2.0 * side**3 / took_s, found, telemetry)


def _sampler(place: Place) -> AbstractContextManager[Sampler | None]:
    return Sampler(place.device) if place.on_gpu else nullcontext()


def faults(stretches: Sequence[Stretch], *, shared: bool = False) -> tuple[str, ...]:
    """Return what is wrong with a device that did so.

    Of one that is `shared` with other programs, as any processor, the pace says nothing.
    """
    found = list[str]()
    wrong = sum(one.wrong for one in stretches)
    if wrong:
        first = next(one for one in stretches if one.wrong)
        products = sum(one.products for one in stretches)
        found.append(
            f"{wrong:,} elements of {products:,} products were wrong, the first within "
            f"{first.began_s + STRETCH_S:.0f} s"
        )
    warm = stretches[WARM:]
    if len(warm) > WARM and not shared:
        paces = [one.flops_per_s for one in warm]
        found += _fall("the pace", paces, warm)
        clocks = [one.telemetry.clock_mhz for one in warm if one.telemetry]
        known = [clock for clock in clocks if clock is not None]
        if len(known) == len(warm):
            found += _fall("the clock", known, warm)
    for reason in sorted(ALARMS):
        held = [one for one in stretches if one.telemetry and reason in one.telemetry.throttle]
        if held:
            found.append(f"{reason} held the clock back, the first time at {held[0].began_s:.0f} s")
    return tuple(found)


def _fall(what: str, values: Sequence[float], stretches: Sequence[Stretch]) -> list[str]:
    """Say where a value stays low: two stretches in a row, as others may use a machine too."""
    first = median(values[:WARM])
    pairs = [max(pair) for pair in zip(values[WARM - 1 :], values[WARM:], strict=False)]
    lowest = min(pairs, default=first)
    if lowest >= (1.0 - SLOWER) * first:
        return []
    at = stretches[WARM + pairs.index(lowest)].began_s
    return [f"{what} fell by {1.0 - lowest / first:.0%}, at {at:.0f} s"]
