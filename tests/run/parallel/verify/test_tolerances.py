"""Limits follow from what was measured, by axis in float32 and by one device's error in 16 bits."""

import math

from meshwright.run.parallel.verify.tolerances import (
    FACTORS,
    FP8_FACTORS,
    FP32,
    ROUNDING,
    Circumstances,
    axes_of,
    limit,
)
from meshwright.spec.layout import Layout

USUAL = Circumstances()


def test_a_layout_gets_the_largest_limit_of_its_axes() -> None:
    layout = Layout(tp=2, pp=2, precision="fp32")
    assert list(axes_of(layout)) == ["tp", "pp", "microbatches"]
    assert limit("activation", layout, 0.0, USUAL) == FP32["tp"]["activation"]
    assert limit("activation", Layout(dp=2, precision="fp32"), 0.0, USUAL) == max(
        FP32["dp"]["activation"], FP32["microbatches"]["activation"]
    )


def test_longer_sums_are_rounded_more_often() -> None:
    layout = Layout(tp=2, precision="fp32")
    long = Circumstances(tokens=1024)
    assert limit("gradient", layout, 0.0, long) == 2 * limit("gradient", layout, 0.0, USUAL)


def test_in_16_bits_a_layout_may_be_off_by_a_multiple_of_one_device() -> None:
    layout = Layout(tp=2, precision="bf16")
    factor = FACTORS["tp"]["update"]
    assert limit("update", layout, 0.1, USUAL) == factor * 0.1
    assert limit("update", layout, 0.0, USUAL) == factor * ROUNDING["bf16"]


def test_in_fp8_a_layout_may_be_off_by_a_multiple_of_one_device() -> None:
    layout = Layout(tp=2, precision="fp8-rowwise")
    factor = FP8_FACTORS["tp"]["gradient"]
    assert limit("gradient", layout, 0.1, USUAL) == factor * 0.1
    assert limit("gradient", layout, 0.0, USUAL) == factor * ROUNDING["fp8-rowwise"]


def test_in_fp8_as_many_tokens_may_go_elsewhere_as_rounding_is_coarser() -> None:
    layout = Layout(dp=2, precision="fp8-rowwise")
    assert limit("gradient", layout, 0.0, Circumstances(rows=64)) == math.sqrt(16 / 64)


def test_in_16_bits_one_token_may_go_to_another_expert() -> None:
    layout, routed = Layout(tp=2, precision="fp16"), Circumstances(rows=64)
    assert limit("gradient", layout, 0.0, routed) == 1 / 8
    assert limit("update", layout, 0.0, routed) == 1 / 4
    exact = Layout(tp=2, precision="fp32")
    assert limit("gradient", exact, 0.0, routed) == limit("gradient", exact, 0.0, USUAL)
