"""Attention: bounds, masks, directions, and the unfused way."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.cost import (
    attention_flops,
    attention_s,
    build_device_costs,
    unfused_attention_s,
)
from meshwright.spec.catalog.hardware import get_gpu

NAMES = ("a100-80g-sxm", "h100-80g-sxm", "b200-180g-sxm", "gb300", "l40s")
LLAMA: dict[str, Any] = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq": 8192}


@given(
    name=st.sampled_from(NAMES),
    batch=st.integers(1, 16),
    heads=st.sampled_from((1, 4, 8, 32, 128)),
    head_dim=st.sampled_from((64, 96, 128, 192, 256)),
    seq=st.integers(1, 256).map(lambda count: 128 * count),
    mask=st.sampled_from(("causal", "full")),
    part=st.sampled_from(("forward", "backward")),
)
def test_no_attention_beats_the_peak(name: str, **shape: Any) -> None:
    device = build_device_costs(get_gpu(name))
    time_s = attention_s(device, kv_heads=1, **shape)
    assert time_s >= attention_flops(**shape) / device.gpu.peak_flops("bf16")


@given(
    name=st.sampled_from(NAMES),
    seq=st.integers(1, 256).map(lambda count: 128 * count),
    mask=st.sampled_from(("causal", "full")),
)
def test_a_longer_sequence_is_never_faster(name: str, seq: int, mask: Any) -> None:
    device = build_device_costs(get_gpu(name))
    shape = {**LLAMA, "mask": mask}
    assert attention_s(device, **{**shape, "seq": seq + 128}) >= attention_s(
        device, **{**shape, "seq": seq}
    )


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_tokens_cost_four_times_at_length(name: str) -> None:
    device = build_device_costs(get_gpu(name))
    ratio = attention_s(device, **{**LLAMA, "seq": 65536}) / attention_s(
        device, **{**LLAMA, "seq": 32768}
    )
    assert 3.8 < ratio <= 4.0


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_mask_saves_less_than_half(name: str) -> None:
    device = build_device_costs(get_gpu(name))
    ratio = attention_s(device, **LLAMA) / attention_s(device, **LLAMA, mask="full")
    assert 0.5 < ratio < 0.75


@pytest.mark.parametrize("name", NAMES)
def test_backward_costs_two_to_four_times_forward(name: str) -> None:
    device = build_device_costs(get_gpu(name))
    ratio = attention_s(device, **LLAMA, part="backward") / attention_s(device, **LLAMA)
    assert 2.2 < ratio < 4.0


def test_a_window_costs_between_nothing_and_the_whole_triangle() -> None:
    device = build_device_costs(get_gpu("h100"))
    times = [
        attention_s(device, **{**LLAMA, "seq": 32768}, window=window)
        for window in (128, 1024, 4096, 16384)
    ]
    assert times == sorted(times)
    assert times[-1] < attention_s(device, **{**LLAMA, "seq": 32768})


def test_a_window_as_wide_as_the_sequence_is_no_window() -> None:
    device = build_device_costs(get_gpu("h100"))
    assert attention_s(device, **LLAMA, window=8192) == attention_s(device, **LLAMA)


def test_few_heads_leave_a_causal_mask_unbalanced() -> None:
    device = build_device_costs(get_gpu("h200"))

    def tflops(heads: int) -> float:
        shape: dict[str, Any] = {"batch": 1, "heads": heads, "head_dim": 128, "seq": 8192}
        return attention_flops(**shape) / attention_s(device, kv_heads=1, **shape) / 1e12

    # Measured with cuDNN: 384 with 4 heads, 499 with 8, 609 with 32.
    assert tflops(4) == pytest.approx(384, rel=0.08)
    assert tflops(8) == pytest.approx(499, rel=0.08)
    assert tflops(32) == pytest.approx(609, rel=0.08)


def test_keys_of_another_length_are_counted() -> None:
    device = build_device_costs(get_gpu("h100"))
    whole = attention_s(device, **LLAMA, mask="full")
    half = attention_s(device, **LLAMA, kv_seq=4096, mask="full")
    last = attention_s(device, **{**LLAMA, "seq": 4096}, kv_seq=8192)
    assert half == pytest.approx(whole / 2, rel=0.05)
    # The last half of the queries sees three quarters of the keys.
    assert attention_flops(batch=1, heads=32, head_dim=128, seq=4096, kv_seq=8192) == pytest.approx(
        0.75 * attention_flops(batch=1, heads=32, head_dim=128, seq=8192)
    )
    assert 0.7 < last / attention_s(device, **LLAMA) < 0.8


def test_unequal_head_sizes_cost_between_the_two() -> None:
    device = build_device_costs(get_gpu("h100"))
    shape = {**LLAMA, "kv_heads": 32}
    small = attention_s(device, **shape)
    mla = attention_s(device, **{**shape, "head_dim": 192}, value_dim=128)
    large = attention_s(device, **{**shape, "head_dim": 192})
    assert small < mla < large


def test_flash_attention_2_is_slower_on_hopper_and_the_native_kernel_elsewhere() -> None:
    hopper, ampere = (
        build_device_costs(get_gpu("h100")),
        build_device_costs(get_gpu("a100-80g-sxm")),
    )
    assert attention_s(hopper, **LLAMA, kernel="flash2") > 1.6 * attention_s(hopper, **LLAMA)
    assert attention_s(ampere, **LLAMA, kernel="flash2") == attention_s(ampere, **LLAMA)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_storing_the_scores_is_slower_than_flash_at_length(part: Any) -> None:
    device = build_device_costs(get_gpu("a100-80g-sxm"))
    shape = {"batch": 4, "heads": 8, "head_dim": 128, "seq": 4096, "part": part}
    unfused = unfused_attention_s(device, **shape)
    assert unfused > 1.5 * attention_s(device, kv_heads=8, **shape)
    assert unfused_attention_s(device, **shape, dropout=0.1) > unfused


def test_no_queries_take_no_time() -> None:
    assert attention_s(build_device_costs(get_gpu("h100")), **{**LLAMA, "seq": 0}) == 0.0
