"""A sick device is found by its slow rows, and by what it says of itself."""

from typing import Any

from msgspec.structs import replace

from meshwright.observe.bench.case import Case, Row, Telemetry
from meshwright.observe.bench.health import alarms, check, usual


def row(family: str, name: str, seconds: float = 1.0, **sizes: Any) -> Row:
    case = Case(family=family, name=name, sizes=sizes)
    return Row(case=case, seconds=seconds, low_s=seconds, high_s=seconds, samples=1)


COPIES = [row("copies", "copy", bytes=size) for size in (1 << 26, 1 << 28, 1 << 30)]
SOUND = {one.case.key: 1.0 for one in COPIES}


def slowed(rows: list[Row], factor: float) -> list[Row]:
    return [row(one.case.family, one.case.name, factor, **one.case.sizes) for one in rows]


def test_slow_memory_is_named_with_how_slow() -> None:
    [found] = check(slowed(COPIES, 1 / 0.82), SOUND)
    assert not found.sound
    assert found.words("H200") == "memory 18 % below H200"


def test_a_device_like_its_kind_or_faster_is_sound() -> None:
    assert all(one.sound for one in check(slowed(COPIES, 1.05), SOUND))
    [fast] = check(slowed(COPIES, 0.5), SOUND)
    assert fast.sound
    assert "above" in fast.words("H200")


def test_one_bad_row_of_many_makes_no_device_sick() -> None:
    [found] = check([*COPIES[:2], *slowed(COPIES[2:], 2.0)], SOUND)
    assert found.sound
    assert found.worst == COPIES[2].case.key


def test_what_does_not_repeat_itself_is_judged_less_sharply() -> None:
    noisy = [replace(one, seconds=1.25, high_s=1.5) for one in COPIES]
    [found] = check(noisy, SOUND)
    assert found.sound
    assert found.allowed > 0.3
    [slow] = check([replace(one, seconds=2.5, high_s=9.0) for one in COPIES], SOUND)
    assert not slow.sound


def test_groups_are_judged_apart() -> None:
    rows = [
        row("products", "forward", 2.0, precision="bf16", m=1),
        row("products", "forward", 1.0, precision="fp16", m=1),
        row("attention", "forward", 1.0, length=1),
    ]
    found = {one.what: one.sound for one in check(rows, {one.case.key: 1.0 for one in rows})}
    assert found == {"products bf16": False, "products fp16": True, "attention forward": True}


def test_rows_nobody_expects_anything_of_are_left_out() -> None:
    assert check([row("storage", "write")], {}) == ()


def test_what_is_usual_is_the_middle_of_all_benches() -> None:
    benches = [slowed(COPIES, seconds) for seconds in (1.0, 1.1, 9.0)]
    assert set(usual(benches).values()) == {1.1}


def test_a_device_that_brakes_is_told_and_a_power_limit_is_not() -> None:
    calm = Telemetry(throttle=("power_cap",))
    hot = Telemetry(throttle=("hardware_thermal", "power_cap"))
    rows = [
        Row(case=COPIES[0].case, seconds=1, low_s=1, high_s=1, samples=1, telemetry=seen)
        for seen in (calm, hot)
    ]
    assert alarms(rows[:1]) == ()
    [said] = alarms(rows)
    assert "hardware_thermal" in said
    assert "1 of 2 cases" in said


class Worn:
    """A GPU with broken memory behind half a link."""

    def uncorrected_errors(self) -> float:
        return 3.0

    def link_width(self) -> tuple[float, float]:
        return 8.0, 16.0


def test_broken_memory_and_missing_lanes_are_told() -> None:
    worn: Any = Worn()
    memory, link = alarms([], worn)
    assert memory.startswith("3 errors")
    assert "8 of 16 lanes" in link
