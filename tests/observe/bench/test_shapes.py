"""Shapes to measure: within their ranges, evenly spread, and never the same twice."""

from math import log2, prod

import pytest

from meshwright.observe.bench.family import Size
from meshwright.observe.bench.products import PARTS, held_out
from meshwright.observe.bench.products import cases as product_cases
from meshwright.observe.bench.shapes import (
    LEAST_FLOPS,
    MOST_FLOPS,
    TOKENS,
    WIDTHS,
    Range,
    product_shapes,
)


def test_a_range_ends_where_it_says_and_keeps_to_its_multiple() -> None:
    sides = Range(512, 32768, 64)
    assert (sides.at(0.0), sides.at(1.0)) == (512, 32768)
    assert all(sides.at(place / 100) % 64 == 0 for place in range(101))


def test_shapes_stay_within_what_training_multiplies() -> None:
    for shape in product_shapes(300):
        assert TOKENS.least <= shape.m <= TOKENS.most
        assert WIDTHS.least <= min(shape.n, shape.k) <= max(shape.n, shape.k) <= WIDTHS.most
        assert LEAST_FLOPS <= shape.flops <= MOST_FLOPS


def test_a_short_stretch_is_the_beginning_of_a_long_one() -> None:
    assert product_shapes(200)[:40] == product_shapes(40)
    assert product_shapes(200)[40:] == product_shapes(160, after=40)
    assert len(set(product_shapes(200))) == 200


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_every_eighth_of_a_side_is_measured(side: str) -> None:
    values = [log2(getattr(shape, side)) for shape in product_shapes(150)]
    low, high = min(values), max(values)
    eighths = {min(7, int(8 * (value - low) / (high - low))) for value in values}
    assert eighths == set(range(8))


def test_held_out_products_are_none_of_those_measured() -> None:
    measured = {case.key for case in product_cases("full", on_gpu=True)}
    assert not measured & {case.key for case in held_out(90)}
    grouped = held_out(9, "grouped")
    assert len(grouped) == 9
    assert not measured & {case.key for case in grouped}


@pytest.mark.parametrize("size", ["quick", "full"])
def test_a_bench_that_is_cut_short_has_some_of_every_kind_of_product(size: Size) -> None:
    found = product_cases(size, on_gpu=True)
    kinds = {case.sizes.get("precision", "grouped") for case in found}
    assert kinds == {
        "bf16", "fp16", "tf32", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "grouped",
    }  # fmt: skip
    first = found[: len(kinds)]
    assert {case.sizes.get("precision", "grouped") for case in first} == kinds


def test_each_of_the_three_products_has_widths_of_every_size() -> None:
    found = product_cases("full", on_gpu=True)
    for precision, sides in (("bf16", "mnk"), ("fp8-blockwise", "mnk")):
        for part in PARTS:
            mine = [c for c in found if (c.name, c.sizes.get("precision")) == (part, precision)]
            for side in sides:
                widths = [log2(case.size(side)) for case in mine]
                assert max(widths) - min(widths) > 4, (precision, part, side)  # of six or seven


def test_few_rows_of_a_precision_are_of_large_products() -> None:
    quick = product_cases("quick", on_gpu=True)
    for precision in ("fp16", "tf32", "fp8-rowwise"):
        mine = [case for case in quick if case.sizes.get("precision") == precision]
        assert mine
        assert all(prod(case.size(side) for side in "mnk") * 2 >= 1e11 for case in mine)
