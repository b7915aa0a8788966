"""A sick device is found by its slow rows, and by what it says of itself."""

from typing import Any

from msgspec.structs import replace

from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.health_check import (
    check_health,
    compute_median_times,
    find_device_faults,
)
from meshwright.observe.hardware.telemetry_sampler import Telemetry


def row(family: str, name: str, seconds: float = 1.0, **sizes: Any) -> BenchRow:
    case = BenchCase(family=family, name=name, sizes=sizes)
    return BenchRow(case=case, median_s=seconds, p10_s=seconds, p90_s=seconds, num_samples=1)


COPIES = [row("memory_copies", "copy", bytes=size) for size in (1 << 26, 1 << 28, 1 << 30)]
SOUND = {one.case.key: 1.0 for one in COPIES}


def slowed(rows: list[BenchRow], factor: float) -> list[BenchRow]:
    return [row(one.case.family, one.case.name, factor, **one.case.sizes) for one in rows]


def test_slow_memory_is_named_with_how_slow() -> None:
    [found] = check_health(slowed(COPIES, 1 / 0.82), SOUND)
    assert not found.passed
    assert found.format_message("H200") == "memory 18 % below H200"


def test_a_device_like_its_kind_or_faster_is_sound() -> None:
    assert all(one.passed for one in check_health(slowed(COPIES, 1.05), SOUND))
    [fast] = check_health(slowed(COPIES, 0.5), SOUND)
    assert fast.passed
    assert "above" in fast.format_message("H200")


def test_one_bad_row_of_many_makes_no_device_sick() -> None:
    [found] = check_health([*COPIES[:2], *slowed(COPIES[2:], 2.0)], SOUND)
    assert found.passed
    assert found.worst_case == COPIES[2].case.key


def test_what_does_not_repeat_itself_is_judged_less_sharply() -> None:
    noisy = [replace(one, median_s=1.25, p90_s=1.5) for one in COPIES]
    [found] = check_health(noisy, SOUND)
    assert found.passed
    assert found.tolerance > 0.3
    [slow] = check_health([replace(one, median_s=2.5, p90_s=9.0) for one in COPIES], SOUND)
    assert not slow.passed


def test_groups_are_judged_apart() -> None:
    rows = [
        row("gemm", "forward", 2.0, precision="bf16", m=1),
        row("gemm", "forward", 1.0, precision="fp16", m=1),
        row("attention", "forward", 1.0, length=1),
    ]
    found = {
        one.row_group: one.passed for one in check_health(rows, {one.case.key: 1.0 for one in rows})
    }
    assert found == {"gemm bf16": False, "gemm fp16": True, "attention forward": True}


def test_rows_nobody_expects_anything_of_are_left_out() -> None:
    assert check_health([row("storage", "write")], {}) == ()


def test_what_is_usual_is_the_middle_of_all_benches() -> None:
    benches = [slowed(COPIES, seconds) for seconds in (1.0, 1.1, 9.0)]
    assert set(compute_median_times(benches).values()) == {1.1}


def test_a_device_that_brakes_is_told_and_a_power_limit_is_not() -> None:
    calm = Telemetry(throttle_reasons=("sw_power_cap",))
    hot = Telemetry(throttle_reasons=("hw_thermal_slowdown", "sw_power_cap"))
    rows = [
        BenchRow(case=COPIES[0].case, median_s=1, p10_s=1, p90_s=1, num_samples=1, telemetry=seen)
        for seen in (calm, hot)
    ]
    assert find_device_faults(rows[:1]) == ()
    [said] = find_device_faults(rows)
    assert "HW thermal slowdown" in said
    assert "1 of 2 cases" in said


class Worn:
    """A GPU with broken memory behind half a link."""

    def uncorrected_ecc_errors(self) -> float:
        return 3.0

    def pcie_link_width(self) -> tuple[float, float]:
        return 8.0, 16.0


def test_broken_memory_and_missing_lanes_are_told() -> None:
    worn: Any = Worn()
    memory, link = find_device_faults([], worn)
    assert memory.startswith("3 errors")
    assert "8 of 16 lanes" in link
