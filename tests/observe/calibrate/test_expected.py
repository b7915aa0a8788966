"""Devices that were measured are sound by what is expected of their kind; slowed ones are not."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.observe.bench.case import Case, Row
from meshwright.observe.bench.health import check
from meshwright.observe.calibrate.expected import expected_of
from meshwright.spec.catalog import gpu

H200 = gpu("h200")
MEASURED = Path(__file__).parents[3] / "validation" / "operators" / "h200_measured.json"


def row(family: str, name: str, seconds: float, sizes: dict[str, Any], **more: Any) -> Row:
    case = Case(family=family, name=name, sizes=sizes)
    return Row(case=case, seconds=seconds, low_s=seconds, high_s=seconds, samples=1, **more)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """What one H200 was measured at with other kernels' timers than ours."""
    if not MEASURED.exists():
        pytest.skip("validation/ is not part of this copy")
    found = json.loads(MEASURED.read_text())
    made = [
        row("products", "forward", one["tn_s"],
            {"m": one["m"], "n": one["n"], "k": one["k"], "precision": "bf16"})
        for one in found["products"]
    ]  # fmt: skip
    made += [
        row("elementwise", "copy", one["s"], {"tokens": one["rows"], "width": one["width"]},
            bytes=float(one["bytes"]))
        for one in found["elementwise"]
        if one["op"] == "copy" and one["bytes"] > 1 << 26  # smaller ones stay in the cache
    ]  # fmt: skip
    return made


def test_a_measured_h200_is_sound(rows: list[Row]) -> None:
    expected = expected_of(rows, H200)
    assert expected.basis == "measured"
    assert [one.what for one in check(rows, expected.seconds)] == ["products bf16", "elementwise"]
    assert all(one.sound for one in check(rows, expected.seconds))


@pytest.mark.parametrize("family", ["products", "elementwise"])
def test_the_same_device_with_slow_rows_planted_is_sick(rows: list[Row], family: str) -> None:
    planted = [
        replace(one, seconds=one.seconds * 1.3) if one.case.family == family else one
        for one in rows
    ]
    sick = [one for one in check(planted, expected_of(rows, H200).seconds) if not one.sound]
    assert [one.what.split()[0] for one in sick] == [family]


def test_a_row_under_load_may_take_longer() -> None:
    sizes = {"m": 8192, "n": 8192, "k": 8192, "precision": "bf16"}
    cool = row("products", "forward", 1.0, sizes)
    key = cool.case.key
    hot = replace(cool, loaded=True)
    assert expected_of([hot], H200).seconds[key] > 1.1 * expected_of([cool], H200).seconds[key]


def test_small_copies_and_pageable_memory_are_not_judged() -> None:
    large, small = 1 << 28, 1 << 16
    copies = [
        row("copies", "copy", 1.0, {"bytes": large}, bytes=2.0 * large),
        row("copies", "copy", 1.0, {"bytes": small}, bytes=2.0 * small),
        row("copies", "host_to_device", 1.0, {"bytes": large, "memory": "pinned"}, bytes=large),
        row("copies", "device_to_host", 1.0, {"bytes": large, "memory": "pageable"}, bytes=large),
    ]
    found = expected_of(copies, H200).seconds
    assert set(found) == {copies[0].case.key, copies[2].case.key}
