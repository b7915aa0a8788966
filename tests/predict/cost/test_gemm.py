"""Matrix products: bounds that physics sets, and how time follows the shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.cost import build_device_costs, gemm_s, linear_s
from meshwright.spec.catalog.hardware import get_gpu, list_gpus

NAMES = ("a100-80g-sxm", "h100-80g-sxm", "h200-141g-sxm", "b200-180g-sxm", "gb200", "mi300x")
devices = st.sampled_from([build_device_costs(get_gpu(name)) for name in NAMES])
sizes = st.integers(1, 512).map(lambda count: 64 * count)
layouts = st.sampled_from(("TN", "NN", "NT"))


@given(device=devices, m=sizes, n=sizes, k=sizes, layout=layouts)
def test_no_product_beats_the_peak_or_the_memory(device, m, n, k, layout) -> None:  # type: ignore[no-untyped-def]
    time_s = gemm_s(device, m, n, k, layout=layout)
    assert time_s >= 2 * m * n * k / device.gpu.peak_flops("bf16")
    assert time_s >= 2 * (m * k + k * n + m * n) / device.gpu.memory_bytes_per_s


@given(device=devices, m=sizes, n=sizes, k=sizes)
def test_a_larger_product_is_never_faster(device, m, n, k) -> None:  # type: ignore[no-untyped-def]
    time_s = gemm_s(device, m, n, k)
    for larger in ((m + 256, n, k), (m, n + 256, k), (m, n, k + 256)):
        assert gemm_s(device, *larger) >= 0.999 * time_s


@given(device=devices, n=sizes, k=sizes)
def test_rows_and_columns_are_worth_the_same_forward(device, n, k) -> None:  # type: ignore[no-untyped-def]
    assert gemm_s(device, 4096, n, k) == pytest.approx(gemm_s(device, n, 4096, k))


@pytest.mark.parametrize("name", NAMES)
def test_doubling_k_of_a_large_product_doubles_its_time(name: str) -> None:
    device = build_device_costs(get_gpu(name))
    ratio = gemm_s(device, 8192, 8192, 16384) / gemm_s(device, 8192, 8192, 8192)
    assert 1.93 < ratio <= 2.0


@pytest.mark.parametrize("name", NAMES)
def test_doubling_tokens_of_a_large_product_doubles_its_time(name: str) -> None:
    device = build_device_costs(get_gpu(name))
    ratio = gemm_s(device, 16384, 8192, 8192) / gemm_s(device, 8192, 8192, 8192)
    assert 1.93 < ratio < 2.07


def test_a_weight_gradient_is_slower_the_fewer_tokens_it_sums() -> None:
    device = build_device_costs(get_gpu("h100"))
    few, many = (
        linear_s(device, tokens, 4096, 4096, part="weight_gradient")
        / linear_s(device, tokens, 4096, 4096)
        for tokens in (1024, 16384)
    )
    assert few > 1.3
    assert many < 1.1


def test_parts_of_a_linear_layer_are_the_products_they_name() -> None:
    device = build_device_costs(get_gpu("h100"))
    assert linear_s(device, 1024, 2048, 4096) == gemm_s(device, 1024, 2048, 4096)
    assert linear_s(device, 1024, 2048, 4096, part="input_gradient") == gemm_s(
        device, 1024, 4096, 2048, layout="NN"
    )
    assert linear_s(device, 1024, 2048, 4096, part="weight_gradient") == gemm_s(
        device, 2048, 4096, 1024, layout="NT"
    )


def test_a_tensor_parallel_shard_with_few_tiles_loses_efficiency() -> None:
    device = build_device_costs(get_gpu("h100"))

    def utilisation(m: int) -> float:
        return 2 * m * 1024 * 8192 / gemm_s(device, m, 1024, 8192) / 989e12

    # The tables' medians are 0.41, 0.56 and 0.76 of the peak: such shards are a weak spot.
    assert utilisation(512) == pytest.approx(0.41, rel=0.25)
    assert utilisation(1024) == pytest.approx(0.56, rel=0.3)
    assert utilisation(2048) == pytest.approx(0.76, rel=0.08)


@pytest.mark.parametrize(
    ("name", "precision", "gain"),
    [
        ("h100", "fp8-tensorwise", 1.8),
        ("h100", "fp8-blockwise", 1.3),
        ("b200", "mxfp8", 1.8),
        ("b200", "nvfp4", 2.5),
    ],
)
def test_narrow_precisions_pay_on_large_products(name: str, precision: str, gain: float) -> None:
    device = build_device_costs(get_gpu(name))
    wide, narrow = (gemm_s(device, 8192, 8192, 8192, p) for p in ("bf16", precision))
    assert gain < wide / narrow < 4.0


def test_gradients_in_fp8_run_slower_than_forward_on_hopper_only() -> None:
    for name, slower in (("h100", True), ("b200", False)):
        device = build_device_costs(get_gpu(name))
        forward, gradient = (
            gemm_s(device, 8192, 8192, 8192, "fp8-tensorwise", layout=layout)
            for layout in ("TN", "NN")
        )
        assert (gradient > 1.03 * forward) is slower


@pytest.mark.parametrize(("n", "slower"), [(50304, 1.0), (50260, 2.0), (50257, 5.0)])
def test_a_vocabulary_that_fills_no_words_is_slow(n: int, slower: float) -> None:
    device = build_device_costs(get_gpu("h200"))
    assert gemm_s(device, 4096, n, 4096) > 0.99 * slower * gemm_s(device, 4096, 50304, 4096)


def test_a_batch_costs_as_much_as_one_product_with_as_many_tiles() -> None:
    device = build_device_costs(get_gpu("h200"))
    batch = gemm_s(device, 2048, 2048, 128, batch=32)
    assert batch == pytest.approx(gemm_s(device, 2048, 32 * 2048, 128), rel=0.15)


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_an_empty_product_takes_no_time(shape: tuple[int, int, int]) -> None:
    assert gemm_s(build_device_costs(get_gpu("h100")), *shape) == 0.0


@pytest.mark.parametrize("name", list(list_gpus()))
def test_every_precision_of_every_catalog_device_has_a_cost(name: str) -> None:
    device = build_device_costs(list_gpus()[name])
    for precision in device.gpu.precisions:
        flops = 2 * 4096**3 / gemm_s(device, 4096, 4096, 4096, precision)
        assert 0.15 < flops / device.gpu.peak_flops(precision) <= 1.0
