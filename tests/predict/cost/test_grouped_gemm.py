"""Experts' grouped products against dense ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.cost import build_device_costs, grouped_gemm_s, linear_s
from meshwright.spec.catalog.hardware import get_gpu

PARTS = ("forward", "input_gradient", "weight_gradient")


@given(
    name=st.sampled_from(("a100-80g-sxm", "h100", "b200")),
    experts=st.sampled_from((1, 8, 64)),
    tokens=st.sampled_from((64, 256, 1024, 4096)),
    n=st.sampled_from((1024, 2816, 14336)),
    k=st.sampled_from((1024, 4096, 7168)),
)
def test_grouped_forward_is_never_faster_than_one_dense_product(
    name: str, experts: int, tokens: int, n: int, k: int
) -> None:
    device = build_device_costs(get_gpu(name))
    grouped = grouped_gemm_s(device, experts, tokens, n, k)
    assert grouped > 0.97 * linear_s(device, experts * tokens, n, k)


@pytest.mark.parametrize("part", PARTS)
def test_efficiency_grows_with_the_tokens_of_an_expert(part: Any) -> None:
    device = build_device_costs(get_gpu("h100"))
    shares = [
        2 * 32 * tokens * 4096 * 7168 / grouped_gemm_s(device, 32, tokens, 4096, 7168, part=part)
        for tokens in (32, 128, 512, 2048)
    ]
    assert shares == sorted(shares)
    assert shares[-1] < device.gpu.peak_flops("bf16")


def test_many_tokens_reach_nearly_the_dense_speed() -> None:
    device = build_device_costs(get_gpu("h100"))
    dense = linear_s(device, 8 * 4096, 14336, 4096)
    assert grouped_gemm_s(device, 8, 4096, 14336, 4096) == pytest.approx(dense, rel=0.06)


def test_a_mean_of_tokens_need_not_be_whole() -> None:
    device = build_device_costs(get_gpu("h100"))
    below, between, above = (
        grouped_gemm_s(device, 8, tokens, 4096, 4096) for tokens in (500, 500.5, 512)
    )
    assert below <= between <= above


def test_no_tokens_take_no_time() -> None:
    assert grouped_gemm_s(build_device_costs(get_gpu("h100")), 8, 0, 4096, 4096) == 0.0
