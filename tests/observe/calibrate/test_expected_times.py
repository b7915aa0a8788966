"""Devices that were measured are sound by what is expected of their kind; slowed ones are not."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.health_check import check_health, classify_row
from meshwright.observe.calibrate.expected_times import LARGE_BYTES, predict_expected_times
from meshwright.spec.catalog import get_gpu

H200 = get_gpu("h200")
MEASURED = Path(__file__).parents[3] / "validation" / "operators" / "h200_measured.json"


def row(family: str, name: str, seconds: float, sizes: dict[str, Any], **more: Any) -> BenchRow:
    case = BenchCase(family=family, name=name, sizes=sizes)
    return BenchRow(
        case=case, median_s=seconds, p10_s=seconds, p90_s=seconds, num_samples=1, **more
    )


@pytest.fixture(scope="module")
def rows() -> list[BenchRow]:
    """What one H200 was measured at with other kernels' timers than ours."""
    if not MEASURED.exists():
        pytest.skip("validation/ is not part of this copy")
    found = json.loads(MEASURED.read_text())
    made = [
        row("gemm", "forward", one["tn_s"],
            {"m": one["m"], "n": one["n"], "k": one["k"], "precision": "bf16"},
            flops=2.0 * one["m"] * one["n"] * one["k"])
        for one in found["products"]
    ]  # fmt: skip
    made += [
        row("memory_bound", "copy", one["s"],
            {"tokens": one["rows"], "width": one["width"], "kernel": "clone"},
            bytes=float(one["bytes"]))
        for one in found["elementwise"]
        if one["op"] == "copy" and one["bytes"] >= LARGE_BYTES
    ]  # fmt: skip
    return made


def test_a_measured_h200_is_sound(rows: list[BenchRow]) -> None:
    expected = predict_expected_times(rows, H200)
    assert expected.basis == "measured"
    found = check_health(rows, expected.seconds, expected.uncertainty)
    assert [one.row_group for one in found] == ["gemm bf16", "memory_bound clone"]
    assert all(one.passed for one in found)


@pytest.mark.parametrize("family", ["gemm", "memory_bound"])
def test_the_same_device_with_slow_rows_planted_is_sick(rows: list[BenchRow], family: str) -> None:
    planted = [
        replace(one, median_s=one.median_s * 1.3) if one.case.family == family else one
        for one in rows
    ]
    expected = predict_expected_times(planted, H200)
    sick = [
        one
        for one in check_health(planted, expected.seconds, expected.uncertainty)
        if not one.passed
    ]
    assert [one.row_group.split()[0] for one in sick] == [family]


def test_a_row_under_load_may_take_longer() -> None:
    sizes = {"m": 8192, "n": 8192, "k": 8192, "precision": "bf16"}
    cool = row("gemm", "forward", 1.0, sizes, flops=2.0 * 8192**3)
    key = cool.case.key
    hot = replace(cool, under_load=True)
    assert (
        predict_expected_times([hot], H200).seconds[key]
        > 1.1 * predict_expected_times([cool], H200).seconds[key]
    )


def test_small_copies_and_pageable_memory_are_not_judged() -> None:
    large, small = 1 << 28, 1 << 16
    copies = [
        row("memory_copies", "copy", 1.0, {"bytes": large}, bytes=2.0 * large),
        row("memory_copies", "copy", 1.0, {"bytes": small}, bytes=2.0 * small),
        row(
            "memory_copies",
            "host_to_device",
            1.0,
            {"bytes": large, "memory": "pinned"},
            bytes=large,
        ),
        row(
            "memory_copies",
            "device_to_host",
            1.0,
            {"bytes": large, "memory": "pageable"},
            bytes=large,
        ),
    ]
    found = predict_expected_times(copies, H200).seconds
    assert set(found) == {copies[0].case.key, copies[2].case.key}


def test_small_products_and_kinds_that_nobody_measured_are_not_judged() -> None:
    def product(side: int, precision: str) -> BenchRow:
        sizes = {"m": side, "n": side, "k": side, "precision": precision}
        return row("gemm", "forward", 1.0, sizes, flops=2.0 * side**3)

    small, large, other = product(1024, "bf16"), product(8192, "bf16"), product(8192, "tf32")
    assert set(predict_expected_times([small, large, other], H200).seconds) == {large.case.key}


# Speeds of two sound H200 over what is expected, the slow, the middle and the fast tenth of rows.
SEEN = {
    "gemm bf16": (0.94, 1.01, 1.15),
    "gemm fp8-tensorwise": (0.94, 1.04, 1.12),
    "gemm fp8-rowwise": (0.78, 0.89, 1.0),
    "attention forward": (0.90, 0.93, 0.97),
    "attention backward": (0.93, 0.95, 0.97),
    "memory": (1.0, 1.01, 1.02),
    "link to the device": (1.0, 1.02, 1.03),
    "link to the host": (1.0, 1.0, 1.03),
}


def card() -> list[BenchRow]:
    """Return rows of a sound card, three of each kind."""
    blank = [
        row("gemm", "forward", 1.0, {"m": m, "n": 8192, "k": 8192, "precision": precision},
            flops=2.0 * m * 8192**2, under_load=True)
        for precision in ("bf16", "fp8-tensorwise", "fp8-rowwise")
        for m in (4096, 8192, 16384)
    ]  # fmt: skip
    blank += [
        row("attention", part, 1.0,
            {"batch": batch, "heads": 32, "kv_heads": 8, "head_dim": 128, "length": 4096,
             "mask": "causal"}, flops=1e12, under_load=True)
        for part in ("forward", "backward")
        for batch in (2, 4, 8)
    ]  # fmt: skip
    for size in (1 << 28, 1 << 29, 1 << 30):
        blank.append(row("memory_copies", "copy", 1.0, {"bytes": size}, bytes=2.0 * size))
        blank += [
            row("memory_copies", name, 1.0, {"bytes": size, "memory": "pinned"}, bytes=float(size))
            for name in ("host_to_device", "device_to_host")
        ]
    expected, turn, made = (
        predict_expected_times(blank, H200).seconds,
        Counter[str](),
        list[BenchRow](),
    )
    for one in blank:
        group = classify_row(one)
        made.append(slower(one, expected[one.case.key] / SEEN[group][turn[group] % 3]))
        turn[group] += 1
    return made


def slower(one: BenchRow, factor: float) -> BenchRow:
    times = {name: factor * getattr(one, name) for name in ("median_s", "p10_s", "p90_s")}
    return replace(one, **times)


def sick(rows: list[BenchRow]) -> set[str]:
    expected = predict_expected_times(rows, H200)
    return {
        one.row_group
        for one in check_health(rows, expected.seconds, expected.uncertainty)
        if not one.passed
    }


def test_a_sound_card_raises_no_alarm() -> None:
    assert sick(card()) == set()


@pytest.mark.parametrize(
    ("group", "speed"),
    [
        ("memory", 0.82),
        ("gemm bf16", 0.85),
        ("gemm fp8-tensorwise", 0.85),
        ("attention forward", 0.8),
        ("link to the host", 0.5),  # half of its lanes are dead
    ],
)
def test_what_is_slow_on_a_card_is_found_and_nothing_else(group: str, speed: float) -> None:
    rows = [slower(one, 1 / speed) if classify_row(one) == group else one for one in card()]
    assert sick(rows) == {group}


def test_figures_of_a_relative_are_judged_with_wide_limits() -> None:
    h20 = get_gpu("h20")
    expected = predict_expected_times(card(), h20)
    assert expected.basis.startswith("transferred")
    assert min(expected.uncertainty.values()) >= 0.25
