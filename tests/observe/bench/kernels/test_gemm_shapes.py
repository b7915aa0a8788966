"""Shapes to measure: within their ranges, evenly spread, and never the same twice."""

from math import log2, prod

import pytest

from meshwright.observe.bench.bench_family import Size
from meshwright.observe.bench.kernels.gemm import (
    GEMM_PASSES,
    list_gemm_cases,
    list_validation_gemms,
)
from meshwright.observe.bench.kernels.gemm_shapes import (
    MAX_FLOPS,
    MIN_FLOPS,
    TOKENS,
    WIDTHS,
    SizeRange,
    sample_gemm_shapes,
)


def test_a_range_ends_where_it_says_and_keeps_to_its_multiple() -> None:
    sides = SizeRange(512, 32768, 64)
    assert (sides.interpolate(0.0), sides.interpolate(1.0)) == (512, 32768)
    assert all(sides.interpolate(place / 100) % 64 == 0 for place in range(101))


def test_shapes_stay_within_what_training_multiplies() -> None:
    for shape in sample_gemm_shapes(300):
        assert TOKENS.min_value <= shape.m <= TOKENS.max_value
        assert (
            WIDTHS.min_value <= min(shape.n, shape.k) <= max(shape.n, shape.k) <= WIDTHS.max_value
        )
        assert MIN_FLOPS <= shape.flops <= MAX_FLOPS


def test_a_short_stretch_is_the_beginning_of_a_long_one() -> None:
    assert sample_gemm_shapes(200)[:40] == sample_gemm_shapes(40)
    assert sample_gemm_shapes(200)[40:] == sample_gemm_shapes(160, after=40)
    assert len(set(sample_gemm_shapes(200))) == 200


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_every_eighth_of_a_side_is_measured(side: str) -> None:
    values = [log2(getattr(shape, side)) for shape in sample_gemm_shapes(150)]
    low, high = min(values), max(values)
    eighths = {min(7, int(8 * (value - low) / (high - low))) for value in values}
    assert eighths == set(range(8))


def test_held_out_products_are_none_of_those_measured() -> None:
    measured = {case.key for case in list_gemm_cases("full", on_gpu=True)}
    assert not measured & {case.key for case in list_validation_gemms(90)}
    grouped = list_validation_gemms(9, "grouped")
    assert len(grouped) == 9
    assert not measured & {case.key for case in grouped}


@pytest.mark.parametrize("size", ["quick", "full"])
def test_a_bench_that_is_cut_short_has_some_of_every_kind_of_product(size: Size) -> None:
    found = list_gemm_cases(size, on_gpu=True)
    kinds = {case.sizes.get("precision", "grouped") for case in found}
    assert kinds == {
        "bf16", "fp16", "tf32", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "grouped",
    }  # fmt: skip
    first = found[: len(kinds)]
    assert {case.sizes.get("precision", "grouped") for case in first} == kinds


def test_each_of_the_three_products_has_widths_of_every_size() -> None:
    found = list_gemm_cases("full", on_gpu=True)
    for precision, sides in (("bf16", "mnk"), ("fp8-blockwise", "mnk")):
        for part in GEMM_PASSES:
            mine = [c for c in found if (c.name, c.sizes.get("precision")) == (part, precision)]
            for side in sides:
                widths = [log2(case.size(side)) for case in mine]
                assert max(widths) - min(widths) > 4, (precision, part, side)  # of six or seven


def test_few_rows_of_a_precision_are_of_large_products() -> None:
    quick = list_gemm_cases("quick", on_gpu=True)
    for precision in ("fp16", "tf32", "fp8-rowwise"):
        mine = [case for case in quick if case.sizes.get("precision") == precision]
        assert mine
        assert all(prod(case.size(side) for side in "mnk") * 2 >= 1e11 for case in mine)
