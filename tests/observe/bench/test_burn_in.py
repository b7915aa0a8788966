"""A burn-in finds bits that change and a pace that falls."""

from itertools import count
from typing import Any

import pytest

from meshwright.observe.bench import burn_in as home
from meshwright.observe.bench.burn_in import Stretch, burn_in, faults
from meshwright.observe.bench.case import Telemetry
from meshwright.observe.bench.family import Place

torch = pytest.importorskip("torch", reason="products are torch's")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(home, "SIDE", {"cpu": 48})
    return Place(torch.device("cpu"))


def test_a_sound_device_repeats_every_bit(place: Place) -> None:
    found = list(burn_in(place, 0.05, stretch_s=0.01))
    assert found
    assert all(one.wrong == 0 and one.products >= home.SETS for one in found)


def test_one_wrong_bit_is_found(place: Place) -> None:
    calls = count()

    def multiply(first: Any, second: Any) -> Any:
        out = torch.mm(first, second)
        if next(calls) == home.SETS + 2:
            out.view(torch.int32)[3, 4] ^= 1
        return out

    found = list(burn_in(place, 0.05, stretch_s=0.01, multiply=multiply))
    assert sum(one.wrong for one in found) == 1
    assert "1 elements" in faults(found)[0]


def stretches(*paces: float, clock: float | None = None, held: str = "") -> list[Stretch]:
    return [
        Stretch(5.0 * number, 8, pace, 0, Telemetry(clock_mhz=clock, throttle=(held,) * bool(held)))
        for number, pace in enumerate(paces)
    ]


def test_a_pace_that_falls_and_stays_low_is_a_fault() -> None:
    [said] = faults(stretches(9, 9, 10, 10, 10, 8, 8, 8))
    assert said == "the pace fell by 20%, at 30 s"
    assert faults(stretches(9, 9, 10, 10, 10, 8, 8, 8), shared=True) == ()


def test_warming_up_or_one_slow_stretch_is_none() -> None:
    assert faults(stretches(20, 15, 10, 10, 10, 5, 10, 10)) == ()
    assert faults(stretches(10, 10, 9.5, 9.6, 9.3, 9.2)) == ()


def test_a_clock_that_drops_is_a_fault() -> None:
    fast, slow = stretches(*[10.0] * 5, clock=1900), stretches(*[10.0] * 3, clock=1400)
    [said] = faults([*fast, *slow])
    assert said.startswith("the clock fell by 26%")


def test_a_thermal_brake_is_a_fault_and_a_power_limit_is_none() -> None:
    assert faults(stretches(10, 10, held="power_cap")) == ()
    [said] = faults(stretches(10, 10, held="hardware_thermal"))
    assert said.startswith("hardware_thermal")
