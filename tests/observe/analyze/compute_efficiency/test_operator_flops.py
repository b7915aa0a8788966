"""FLOPs of operators are those of the products that their shapes say."""

import json
from typing import Any

import pytest

from meshwright.observe.analyze.compute_efficiency.operator_flops import find_operator_flops
from tests.observe.analyze.traces import host, timeline

BF16 = "c10::BFloat16"


def _operator(name: str, dims: list[Any], given: list[str] | None = None, kind: str = BF16) -> Any:
    said = {"Input Dims": dims, "Input type": [kind], "Concrete Inputs": given or []}
    return host(0, 10, name, extra=json.dumps(said))


@pytest.mark.parametrize(
    ("name", "dims", "given", "flops"),
    [
        ("aten::mm", [[3, 5], [5, 7]], [], 2 * 3 * 5 * 7),
        ("aten::addmm", [[7], [3, 5], [5, 7], [], []], [], 2 * 3 * 5 * 7),
        ("aten::bmm", [[4, 3, 5], [4, 5, 7]], [], 2 * 4 * 3 * 5 * 7),
        ("aten::baddbmm", [[4, 3, 7], [4, 3, 5], [4, 5, 7]], [], 2 * 4 * 3 * 5 * 7),
        ("aten::linear", [[2, 3, 5], [7, 5], [7]], [], 2 * 6 * 5 * 7),
        # 8 images of 3 x 32 x 32, 16 kernels of 3 x 3 x 3, padded: 32 x 32 results.
        (
            "aten::convolution",
            [[8, 3, 32, 32], [16, 3, 3, 3]],
            ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"],
            2 * 8 * 16 * 32 * 32 * 27,
        ),
        # Steps of 14 without padding: 2 x 2 results.
        (
            "aten::cudnn_convolution",
            [[1, 3, 28, 28], [16, 3, 14, 14]],
            ["", "", "[0, 0]", "[14, 14]", "[1, 1]", "1"],
            2 * 16 * 2 * 2 * 3 * 14 * 14,
        ),
        (
            "aten::convolution_backward",
            [[8, 16, 32, 32], [8, 3, 32, 32], [16, 3, 3, 3]],
            ["[True, True, False]"],
            2 * 2 * 8 * 16 * 32 * 32 * 27,
        ),
        (
            "aten::convolution_backward",
            [[8, 16, 32, 32], [8, 3, 32, 32], [16, 3, 3, 3]],
            ["[False, True, False]"],
            2 * 8 * 16 * 32 * 32 * 27,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 4, 128, 64], [2, 4, 256, 64], [2, 4, 256, 64]],
            ["", "", "", "0.", "False", "False"],
            2 * 2 * 2 * 4 * 128 * 256 * 64,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 4, 128, 64], [2, 4, 128, 64], [2, 4, 128, 64]],
            ["", "", "", "0.", "True", "False"],
            2 * 2 * 4 * 128 * 128 * 64,
        ),
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            [[2, 4, 128, 64]] * 4,
            ["", "", "", "", "", "", "", "", "", "", "0.", "False"],
            5 * 2 * 2 * 4 * 128 * 128 * 64,
        ),
    ],
)
def test_flops_follow_the_shapes(name: str, dims: Any, given: Any, flops: float) -> None:
    found = find_operator_flops(timeline(_operator(name, dims, given)))
    assert found.flops.tolist() == [flops]
    assert found.dtype == ("bf16",)


def test_the_shapes_and_the_type_are_kept() -> None:
    found = find_operator_flops(
        timeline(_operator("aten::_scaled_mm", [[3, 5], [5, 7], []], kind="c10::Float8_e4m3fn"))
    )
    assert (found.dtype, found.shape) == (("fp8",), ("[3, 5] [5, 7]",))


@pytest.mark.parametrize(
    "row",
    [
        host(0, 10, "aten::mm"),
        host(0, 10, "aten::mm", extra='{"Input Dims": [[3, 5]]}'),
        host(0, 10, "aten::mm", extra='{"Input Dims": "none"}'),
        host(0, 10, "aten::add", extra='{"Input Dims": [[3, 5], [5, 7]]}'),
    ],
)
def test_what_does_not_say_enough_is_not_counted(row: Any) -> None:
    assert find_operator_flops(timeline(row)).row.size == 0
