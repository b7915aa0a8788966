"""A burn-in finds bits that change and a pace that falls."""

from itertools import count
from typing import Any

import pytest

from meshwright.observe.bench import burn_in
from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.burn_in import BurnInInterval, find_burn_in_faults, run_burn_in
from meshwright.observe.hardware.telemetry_sampler import Telemetry

torch = pytest.importorskip("torch", reason="products are torch's")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> BenchTarget:
    monkeypatch.setattr(burn_in, "GEMM_SIZE", {"cpu": 48})
    return BenchTarget(torch.device("cpu"))


def test_a_sound_device_repeats_every_bit(place: BenchTarget) -> None:
    found = list(run_burn_in(place, 0.05, stretch_s=0.01))
    assert found
    assert all(
        one.num_wrong_elements == 0 and one.num_gemms >= burn_in.NUM_INPUT_SETS for one in found
    )


def test_one_wrong_bit_is_found(place: BenchTarget) -> None:
    calls = count()

    def multiply(first: Any, second: Any) -> Any:
        out = torch.mm(first, second)
        if next(calls) == burn_in.NUM_INPUT_SETS + 2:
            out.view(torch.int32)[3, 4] ^= 1
        return out

    found = list(run_burn_in(place, 0.05, stretch_s=0.01, multiply=multiply))
    assert sum(one.num_wrong_elements for one in found) == 1
    assert "1 elements" in find_burn_in_faults(found)[0]


def stretches(*paces: float, clock: float | None = None, held: str = "") -> list[BurnInInterval]:
    return [
        BurnInInterval(
            5.0 * number,
            8,
            pace,
            0,
            Telemetry(clock_mhz=clock, throttle_reasons=(held,) * bool(held)),
        )
        for number, pace in enumerate(paces)
    ]


def test_a_pace_that_falls_and_stays_low_is_a_fault() -> None:
    [said] = find_burn_in_faults(stretches(9, 9, 10, 10, 10, 8, 8, 8))
    assert said == "the pace fell by 20%, at 30 s"
    assert find_burn_in_faults(stretches(9, 9, 10, 10, 10, 8, 8, 8), shared=True) == ()


def test_warming_up_or_one_slow_stretch_is_none() -> None:
    assert find_burn_in_faults(stretches(20, 15, 10, 10, 10, 5, 10, 10)) == ()
    assert find_burn_in_faults(stretches(10, 10, 9.5, 9.6, 9.3, 9.2)) == ()


def test_a_clock_that_drops_is_a_fault() -> None:
    fast, slow = stretches(*[10.0] * 5, clock=1900), stretches(*[10.0] * 3, clock=1400)
    [said] = find_burn_in_faults([*fast, *slow])
    assert said.startswith("the clock fell by 26%")


def test_a_thermal_brake_is_a_fault_and_a_power_limit_is_none() -> None:
    assert find_burn_in_faults(stretches(10, 10, held="sw_power_cap")) == ()
    [said] = find_burn_in_faults(stretches(10, 10, held="hw_thermal_slowdown"))
    assert said.startswith("clocks throttled: HW thermal slowdown")
