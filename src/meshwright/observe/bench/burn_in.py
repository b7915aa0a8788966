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

from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.health_check import FAULT_THROTTLE_REASONS
from meshwright.observe.hardware.hardware_sample import format_throttle_reason
from meshwright.observe.hardware.telemetry_sampler import Telemetry, TelemetrySampler

if TYPE_CHECKING:
    import torch

INTERVAL_S = 5.0
GEMM_SIZE = {"cuda": 8192, "cpu": 512}
NUM_INPUT_SETS = 8
NUM_WARMUP_INTERVALS = 2
"""Stretches that only warm the device."""
SLOWDOWN_THRESHOLD = 0.10
"""A stretch that is so much slower than those at the beginning is a fault."""


class BurnInInterval(NamedTuple):
    """What was done in some seconds."""

    start_s: float
    num_gemms: int
    flops_per_s: float
    num_wrong_elements: int
    """Elements that were not what they had been."""
    telemetry: Telemetry | None = None


Multiply = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def run_burn_in(
    place: BenchTarget,
    seconds: float,
    *,
    stretch_s: float = INTERVAL_S,
    multiply: Multiply | None = None,
) -> Iterator[BurnInInterval]:
    """Yield stretches until the time is over."""
    import torch

    side = GEMM_SIZE[place.device.type]
    format_ = torch.bfloat16 if place.on_gpu else torch.float32
    product = multiply or torch.mm
    sets = [
        tuple(torch.randn(side, side, device=place.device).to(format_) for _ in range(2))
        for _ in range(NUM_INPUT_SETS)
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
                done += NUM_INPUT_SETS
                if place.on_gpu:
                    torch.cuda.synchronize(place.device)
            found = int(wrong.item())
        took_s = time.perf_counter() - begun - at
        telemetry = None if sampler is None else sampler.summarize()
        yield BurnInInterval(at, done, done * 2.0 * side**3 / took_s, found, telemetry)


def _sampler(place: BenchTarget) -> AbstractContextManager[TelemetrySampler | None]:
    return TelemetrySampler(place.device) if place.on_gpu else nullcontext()


def find_burn_in_faults(
    stretches: Sequence[BurnInInterval], *, shared: bool = False
) -> tuple[str, ...]:
    """Return what is wrong with a device that did so.

    Of one that is `shared` with other programs, as any processor, the pace says nothing.
    """
    found = list[str]()
    wrong = sum(one.num_wrong_elements for one in stretches)
    if wrong:
        first = next(one for one in stretches if one.num_wrong_elements)
        products = sum(one.num_gemms for one in stretches)
        found.append(
            f"{wrong:,} elements of {products:,} products were wrong, the first within "
            f"{first.start_s + INTERVAL_S:.0f} s"
        )
    warm = stretches[NUM_WARMUP_INTERVALS:]
    if len(warm) > NUM_WARMUP_INTERVALS and not shared:
        paces = [one.flops_per_s for one in warm]
        found += _fall("the pace", paces, warm)
        clocks = [one.telemetry.clock_mhz for one in warm if one.telemetry]
        known = [clock for clock in clocks if clock is not None]
        if len(known) == len(warm):
            found += _fall("the clock", known, warm)
    for reason in sorted(FAULT_THROTTLE_REASONS):
        held = [
            one for one in stretches if one.telemetry and reason in one.telemetry.throttle_reasons
        ]
        if held:
            name = format_throttle_reason(reason)
            found.append(f"clocks throttled: {name}, first at {held[0].start_s:.0f} s")
    return tuple(found)


def _fall(what: str, values: Sequence[float], stretches: Sequence[BurnInInterval]) -> list[str]:
    """Say where a value stays low: two stretches in a row, as others may use a machine too."""
    first = median(values[:NUM_WARMUP_INTERVALS])
    pairs = [
        max(pair)
        for pair in zip(
            values[NUM_WARMUP_INTERVALS - 1 :], values[NUM_WARMUP_INTERVALS:], strict=False
        )
    ]
    lowest = min(pairs, default=first)
    if lowest >= (1.0 - SLOWDOWN_THRESHOLD) * first:
        return []
    at = stretches[NUM_WARMUP_INTERVALS + pairs.index(lowest)].start_s
    return [f"{what} fell by {1.0 - lowest / first:.0%}, at {at:.0f} s"]
