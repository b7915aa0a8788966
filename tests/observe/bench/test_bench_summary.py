"""A bench in a few lines."""

from typing import Any

import pytest

from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.bench_summary import summarize_rows, summarize_telemetry
from meshwright.observe.hardware.telemetry_sampler import Telemetry
from meshwright.spec.catalog import get_gpu

H200 = get_gpu("h200")


def row(family: str, name: str, seconds: float, sizes: dict[str, Any], **more: Any) -> BenchRow:
    case = BenchCase(family=family, name=name, sizes=sizes)
    return BenchRow(
        case=case, median_s=seconds, p10_s=seconds, p90_s=seconds, num_samples=1, **more
    )


def test_products_are_held_against_the_peak_of_their_precision() -> None:
    rows = [
        row("gemm", "forward", 1.0, {"m": m, "precision": precision}, flops=flops)
        for m, (precision, flops) in enumerate(
            [("bf16", 700e12), ("bf16", 500e12), ("fp8-rowwise", 1000e12)]
        )
    ]
    first, second = summarize_rows(rows, H200)
    assert (first.operation, first.best, first.median, first.num_cases) == (
        "bf16",
        700e12,
        600e12,
        2,
    )
    assert first.share == pytest.approx(700 / 989)
    assert second.share == pytest.approx(1000 / 1979)


def test_a_copy_both_ways_has_twice_the_link() -> None:
    sizes = {"bytes": 1, "memory": "pinned"}
    [line] = summarize_rows([row("memory_copies", "both_ways", 1.0, sizes, bytes=63e9)], H200)
    assert line.share == pytest.approx(0.5)


def test_collectives_show_bus_bandwidth_and_the_shortest_time() -> None:
    sizes = {"ranks": 4, "backend": "nccl"}
    rows = [
        row("collectives", "all_reduce", seconds, {**sizes, "bytes": size}, bytes=float(size))
        for size, seconds in ((1000, 1e-5), (10**9, 0.01))
    ]
    [line] = summarize_rows(rows, H200)
    assert line.best == pytest.approx(1e11 * 1.5)
    assert line.shortest_s == 1e-5
    assert line.operation == "all reduce, 4 ranks, nccl"


def test_times_of_launches_are_shown_as_times() -> None:
    [line] = summarize_rows([row("launch_overhead", "host", 5e-6, {"operation": "add"})], H200)
    assert (line.unit, line.best, line.share) == ("seconds", 5e-6, None)


def test_a_processor_has_no_stated_peak() -> None:
    sizes = {"precision": "fp32"}
    [line] = summarize_rows([row("gemm", "forward", 1.0, sizes, flops=1e11)], get_gpu("cpu-core"))
    assert line.share is None


def test_what_a_device_said_is_summed_up_by_family() -> None:
    seen = [
        Telemetry(clock_mhz=1900, power_w=690, temperature_c=60),
        Telemetry(
            clock_mhz=1700, power_w=700, temperature_c=66, throttle_reasons=("sw_power_cap",)
        ),
    ]
    rows = [row("gemm", "forward", 1.0, {"m": m}, telemetry=one) for m, one in enumerate(seen)]
    [found] = summarize_telemetry([*rows, row("storage", "write", 1.0, {})])
    assert found == ("gemm", 1800, 695, 66, ("sw_power_cap",))
