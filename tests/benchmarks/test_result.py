"""A benchmark's result: targets, printing, and the files that keep it."""

import getpass
import platform
from pathlib import Path

import msgspec
import pytest

from benchmarks.machine import describe
from benchmarks.result import Figure, Measured, Result, met, pretty, read_all, write


def _result(name: str, date: str) -> Result:
    figure = Figure(name="write", value=3.5, unit="s", target="< 15")
    return Result(
        name=name,
        question="How fast?",
        date=date,
        wall_s=4.0,
        peak_memory_bytes=1 << 20,
        machine=describe(),
        measured=Measured(figures=(figure,)),
    )


@pytest.mark.parametrize(
    ("target", "value", "expected"),
    [
        ("< 15", 14.9, True),
        ("< 15", 15, False),
        ("<= 15", 15, True),
        ("≥ 200,000", 199_999, False),
        (">= 200_000", 200_000, True),
        ("> 1e3", 1001, True),
        ("", 1, None),
    ],
)
def test_a_target_is_compared_with_the_value(
    target: str, value: float, expected: bool | None
) -> None:
    assert met(Figure(name="x", value=value, unit="s", target=target)) is expected


def test_a_target_without_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="write it like"):
        msgspec.convert({"name": "x", "value": 1, "unit": "s", "target": "15"}, Figure)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.01234"), (3.14159, "3.142"), (10_000_000, "10,000,000")],
)
def test_numbers_print_with_few_digits(value: float, text: str) -> None:
    assert pretty(value) == text


def test_results_come_back_by_name_then_date(tmp_path: Path) -> None:
    kept = [_result("b", "2026-01-02"), _result("a", "2026-02-01"), _result("a", "2026-01-01")]
    for result in kept:
        write(result, tmp_path)
    assert read_all(tmp_path) == [kept[2], kept[1], kept[0]]


def test_a_machine_description_names_no_person_or_place() -> None:
    words = msgspec.json.encode(describe()).decode().split('"')
    assert platform.node() not in words
    assert getpass.getuser() not in words
