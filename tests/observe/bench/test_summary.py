"""A bench in a few lines."""

from typing import Any

import pytest

from meshwright.observe.bench.case import Case, Row, Telemetry
from meshwright.observe.bench.summary import lines, meanwhile
from meshwright.spec.catalog import gpu

H200 = gpu("h200")


def row(family: str, name: str, seconds: float, sizes: dict[str, Any], **more: Any) -> Row:
    case = Case(family=family, name=name, sizes=sizes)
    return Row(case=case, seconds=seconds, low_s=seconds, high_s=seconds, samples=1, **more)


def test_products_are_held_against_the_peak_of_their_precision() -> None:
    rows = [
        row("products", "forward", 1.0, {"m": m, "precision": precision}, flops=flops)
        for m, (precision, flops) in enumerate(
            [("bf16", 700e12), ("bf16", 500e12), ("fp8-rowwise", 1000e12)]
        )
    ]
    first, second = lines(rows, H200)
    assert (first.what, first.best, first.middle, first.cases) == ("bf16", 700e12, 600e12, 2)
    assert first.share == pytest.approx(700 / 989)
    assert second.share == pytest.approx(1000 / 1979)


def test_a_copy_both_ways_has_twice_the_link() -> None:
    sizes = {"bytes": 1, "memory": "pinned"}
    [line] = lines([row("copies", "both_ways", 1.0, sizes, bytes=63e9)], H200)
    assert line.share == pytest.approx(0.5)


def test_collectives_show_bus_bandwidth_and_the_shortest_time() -> None:
    sizes = {"ranks": 4, "backend": "nccl"}
    rows = [
        row("collectives", "all_reduce", seconds, {**sizes, "bytes": size}, bytes=float(size))
        for size, seconds in ((1000, 1e-5), (10**9, 0.01))
    ]
    [line] = lines(rows, H200)
    assert line.best == pytest.approx(1e11 * 1.5)
    assert line.shortest_s == 1e-5
    assert line.what == "all reduce, 4 ranks, nccl"


def test_times_of_launches_are_shown_as_times() -> None:
    [line] = lines([row("launches", "host", 5e-6, {"operation": "add"})], H200)
    assert (line.unit, line.best, line.share) == ("seconds", 5e-6, None)


def test_a_processor_has_no_stated_peak() -> None:
    sizes = {"precision": "fp32"}
    [line] = lines([row("products", "forward", 1.0, sizes, flops=1e11)], gpu("cpu-core"))
    assert line.share is None


def test_what_a_device_said_is_summed_up_by_family() -> None:
    seen = [
        Telemetry(clock_mhz=1900, power_w=690, temperature_c=60),
        Telemetry(clock_mhz=1700, power_w=700, temperature_c=66, throttle=("power_cap",)),
    ]
    rows = [row("products", "forward", 1.0, {"m": m}, telemetry=one) for m, one in enumerate(seen)]
    [found] = meanwhile([*rows, row("storage", "write", 1.0, {})])
    assert found == ("products", 1800, 695, 66, ("power_cap",))
