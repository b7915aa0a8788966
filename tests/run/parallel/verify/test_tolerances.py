"""Limits follow from what was measured, by axis in float32 and by one device's error in 16 bits."""

import math

from meshwright.run.parallel.verify.tolerances import (
    FACTORS,
    FP8_FACTORS,
    FP32_TOLERANCES,
    ROUNDING_ERRORS,
    ToleranceContext,
    compute_error_limit,
    iter_active_axes,
)
from meshwright.spec.layout import Layout

USUAL = ToleranceContext()


def test_a_layout_gets_the_largest_limit_of_its_axes() -> None:
    layout = Layout(tp=2, pp=2, precision="fp32")
    assert list(iter_active_axes(layout)) == ["tp", "pp", "microbatches"]
    assert (
        compute_error_limit("activation", layout, 0.0, USUAL) == FP32_TOLERANCES["tp"]["activation"]
    )
    assert compute_error_limit("activation", Layout(dp=2, precision="fp32"), 0.0, USUAL) == max(
        FP32_TOLERANCES["dp"]["activation"], FP32_TOLERANCES["microbatches"]["activation"]
    )


def test_longer_sums_are_rounded_more_often() -> None:
    layout = Layout(tp=2, precision="fp32")
    long = ToleranceContext(tokens=1024)
    assert compute_error_limit("gradient", layout, 0.0, long) == 2 * compute_error_limit(
        "gradient", layout, 0.0, USUAL
    )


def test_in_16_bits_a_layout_may_be_off_by_a_multiple_of_one_device() -> None:
    layout = Layout(tp=2, precision="bf16")
    factor = FACTORS["tp"]["update"]
    assert compute_error_limit("update", layout, 0.1, USUAL) == factor * 0.1
    assert compute_error_limit("update", layout, 0.0, USUAL) == factor * ROUNDING_ERRORS["bf16"]


def test_in_fp8_a_layout_may_be_off_by_a_multiple_of_one_device() -> None:
    layout = Layout(tp=2, precision="fp8-rowwise")
    factor = FP8_FACTORS["tp"]["gradient"]
    assert compute_error_limit("gradient", layout, 0.1, USUAL) == factor * 0.1
    assert (
        compute_error_limit("gradient", layout, 0.0, USUAL)
        == factor * ROUNDING_ERRORS["fp8-rowwise"]
    )


def test_in_fp8_as_many_tokens_may_go_elsewhere_as_rounding_is_coarser() -> None:
    layout = Layout(dp=2, precision="fp8-rowwise")
    assert compute_error_limit(
        "gradient", layout, 0.0, ToleranceContext(expert_rows=64)
    ) == math.sqrt(16 / 64)


def test_in_16_bits_one_token_may_go_to_another_expert() -> None:
    layout, routed = Layout(tp=2, precision="fp16"), ToleranceContext(expert_rows=64)
    assert compute_error_limit("gradient", layout, 0.0, routed) == 1 / 8
    assert compute_error_limit("update", layout, 0.0, routed) == 1 / 4
    exact = Layout(tp=2, precision="fp32")
    assert compute_error_limit("gradient", exact, 0.0, routed) == compute_error_limit(
        "gradient", exact, 0.0, USUAL
    )
