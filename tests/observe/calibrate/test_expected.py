"""Devices that were measured are sound by what is expected of their kind; slowed ones are not."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.observe.bench.case import Case, Row
from meshwright.observe.bench.health import check, group_of
from meshwright.observe.calibrate.expected import LARGE_BYTES, expected_of
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
            {"m": one["m"], "n": one["n"], "k": one["k"], "precision": "bf16"},
            flops=2.0 * one["m"] * one["n"] * one["k"])
        for one in found["products"]
    ]  # fmt: skip
    made += [
        row("elementwise", "copy", one["s"],
            {"tokens": one["rows"], "width": one["width"], "kernel": "clone"},
            bytes=float(one["bytes"]))
        for one in found["elementwise"]
        if one["op"] == "copy" and one["bytes"] >= LARGE_BYTES
    ]  # fmt: skip
    return made


def test_a_measured_h200_is_sound(rows: list[Row]) -> None:
    expected = expected_of(rows, H200)
    assert expected.basis == "measured"
    found = check(rows, expected.seconds, expected.doubts)
    assert [one.what for one in found] == ["products bf16", "elementwise clone"]
    assert all(one.sound for one in found)


@pytest.mark.parametrize("family", ["products", "elementwise"])
def test_the_same_device_with_slow_rows_planted_is_sick(rows: list[Row], family: str) -> None:
    planted = [
        replace(one, seconds=one.seconds * 1.3) if one.case.family == family else one
        for one in rows
    ]
    expected = expected_of(planted, H200)
    sick = [one for one in check(planted, expected.seconds, expected.doubts) if not one.sound]
    assert [one.what.split()[0] for one in sick] == [family]


def test_a_row_under_load_may_take_longer() -> None:
    sizes = {"m": 8192, "n": 8192, "k": 8192, "precision": "bf16"}
    cool = row("products", "forward", 1.0, sizes, flops=2.0 * 8192**3)
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


def test_small_products_and_kinds_that_nobody_measured_are_not_judged() -> None:
    def product(side: int, precision: str) -> Row:
        sizes = {"m": side, "n": side, "k": side, "precision": precision}
        return row("products", "forward", 1.0, sizes, flops=2.0 * side**3)

    small, large, other = product(1024, "bf16"), product(8192, "bf16"), product(8192, "tf32")
    assert set(expected_of([small, large, other], H200).seconds) == {large.case.key}


# Speeds of two sound H200 over what is expected, the slow, the middle and the fast tenth of rows.
SEEN = {
    "products bf16": (0.94, 1.01, 1.15),
    "products fp8-tensorwise": (0.94, 1.04, 1.12),
    "products fp8-rowwise": (0.78, 0.89, 1.0),
    "attention forward": (0.90, 0.93, 0.97),
    "attention backward": (0.93, 0.95, 0.97),
    "memory": (1.0, 1.01, 1.02),
    "link to the device": (1.0, 1.02, 1.03),
    "link to the host": (1.0, 1.0, 1.03),
}


def card() -> list[Row]:
    """Return rows of a sound card, three of each kind."""
    blank = [
        row("products", "forward", 1.0, {"m": m, "n": 8192, "k": 8192, "precision": precision},
            flops=2.0 * m * 8192**2, loaded=True)
        for precision in ("bf16", "fp8-tensorwise", "fp8-rowwise")
        for m in (4096, 8192, 16384)
    ]  # fmt: skip
    blank += [
        row("attention", part, 1.0,
            {"batch": batch, "heads": 32, "kv_heads": 8, "head_dim": 128, "length": 4096,
             "mask": "causal"}, flops=1e12, loaded=True)
        for part in ("forward", "backward")
        for batch in (2, 4, 8)
    ]  # fmt: skip
    for size in (1 << 28, 1 << 29, 1 << 30):
        blank.append(row("copies", "copy", 1.0, {"bytes": size}, bytes=2.0 * size))
        blank += [
            row("copies", name, 1.0, {"bytes": size, "memory": "pinned"}, bytes=float(size))
            for name in ("host_to_device", "device_to_host")
        ]
    expected, turn, made = expected_of(blank, H200).seconds, Counter[str](), list[Row]()
    for one in blank:
        group = group_of(one)
        made.append(slower(one, expected[one.case.key] / SEEN[group][turn[group] % 3]))
        turn[group] += 1
    return made


def slower(one: Row, factor: float) -> Row:
    times = {name: factor * getattr(one, name) for name in ("seconds", "low_s", "high_s")}
    return replace(one, **times)


def sick(rows: list[Row]) -> set[str]:
    expected = expected_of(rows, H200)
    return {one.what for one in check(rows, expected.seconds, expected.doubts) if not one.sound}


def test_a_sound_card_raises_no_alarm() -> None:
    assert sick(card()) == set()


@pytest.mark.parametrize(
    ("group", "speed"),
    [
        ("memory", 0.82),
        ("products bf16", 0.85),
        ("products fp8-tensorwise", 0.85),
        ("attention forward", 0.8),
        ("link to the host", 0.5),  # half of its lanes are dead
    ],
)
def test_what_is_slow_on_a_card_is_found_and_nothing_else(group: str, speed: float) -> None:
    rows = [slower(one, 1 / speed) if group_of(one) == group else one for one in card()]
    assert sick(rows) == {group}


def test_figures_of_a_relative_are_judged_with_wide_limits() -> None:
    h20 = gpu("h20")
    expected = expected_of(card(), h20)
    assert expected.basis.startswith("transferred")
    assert min(expected.doubts.values()) >= 0.25
