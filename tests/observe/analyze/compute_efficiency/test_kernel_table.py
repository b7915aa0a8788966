"""The kernel table: times, shares, shapes, and rates against the device."""

import json

import pytest

from meshwright.observe.analyze.compute_efficiency.kernel_table import analyze_rank_kernels
from meshwright.observe.analyze.compute_efficiency.mfu import analyze_rank_mfu
from meshwright.observe.analyze.compute_efficiency.trace_device import find_peak_flops
from meshwright.observe.hardware.catalog_device import find_catalog_device
from meshwright.spec.catalog import get_gpu
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.traces import call, collective, copy, host, kernel, step, timeline

H100 = {"devices": '[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]'}
MM = json.dumps({"Input Dims": [[1000, 500], [500, 200]], "Input type": ["c10::BFloat16"]})
FLOPS = 2 * 1000 * 500 * 200


def test_rows_are_sorted_by_total_time() -> None:
    found = analyze_rank_kernels(
        timeline(
            kernel(0, 10, "a"),
            kernel(20, 50, "a"),
            collective(40, 140, "ncclDevKernel_AllReduce"),
            kernel(60, 70, "b"),
        )
    )
    assert [k.name for k in found.kernels] == ["ncclDevKernel_AllReduce", "a", "b"]
    first = found.kernels[1]
    assert (first.num_launches, first.total_ns, first.mean_ns) == (2, 40, 20)
    assert (first.min_ns, first.max_ns) == (10, 30)
    assert found.busy_ns == 130
    assert first.share == pytest.approx(40 / 130)


def _product() -> Timeline:
    return timeline(
        host(0, 100, "aten::linear", extra=MM),
        host(10, 90, "aten::mm", extra=MM),
        call(20, 25, flow_out=1),
        call(30, 35, flow_out=2),
        call(120, 125, flow_out=3),
        kernel(1000, 2000, "gemm", flow_in=1, extra='{"grid": [8, 1, 1], "block": [128, 1, 1]}'),
        kernel(2000, 5000, "splitKreduce_kernel", flow_in=2),
        kernel(5000, 6000, "gemm", flow_in=3),
        metadata=H100,
    )


def test_a_product_gives_its_flops_to_the_kernel_that_does_it() -> None:
    table = {k.name: k for k in analyze_rank_kernels(_product()).kernels}
    gemm = table["gemm"]
    assert (gemm.flops, gemm.dtype, gemm.shape) == (FLOPS, "bf16", "[1000, 500] [500, 200]")
    # 0.2 GFLOP in 1 µs; the second launch has no operator and does not count.
    assert gemm.flops_per_s == pytest.approx(FLOPS / 1e-6)
    assert gemm.peak_share == pytest.approx(FLOPS / 1e-6 / (get_gpu("h100").bf16_flops or 0))
    assert table["splitKreduce_kernel"].flops_per_s is None


def test_the_grid_is_that_of_the_longest_launch() -> None:
    part = timeline(
        kernel(0, 10, "a", extra='{"grid": [1, 1, 1], "block": [32, 1, 1]}'),
        kernel(20, 90, "a", extra='{"grid": [8, 1, 1], "block": [64, 1, 1]}'),
    )
    assert analyze_rank_kernels(part).kernels[0].grid == "[8, 1, 1] x [64, 1, 1]"


def test_copies_have_a_rate() -> None:
    (row,) = analyze_rank_kernels(timeline(copy(0, 1000, bytes=5000), copy(2000, 3000))).kernels
    assert row.bytes_per_s == pytest.approx(5e9)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g-sxm"),
        ("Tesla V100-SXM2-32GB", "v100-32g-sxm"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA B200", "b200-180g-sxm"),
    ],
)
def test_a_drivers_name_finds_the_device(said: str, name: str) -> None:
    found = find_catalog_device(said)
    assert found is not None
    assert found.name == name


def test_an_unknown_device_has_no_peak() -> None:
    assert find_catalog_device("Quantum Abacus 9") is None
    assert analyze_rank_kernels(timeline(kernel(0, 5))).device == ""


def test_single_precision_in_tensor_cores_has_their_peak() -> None:
    device = get_gpu("a100")
    assert find_peak_flops(device, "fp32", "ampere_sgemm_128x64") == device.fp32_flops
    assert find_peak_flops(device, "fp32", "cutlass_tensorop_s1688gemm_tf32") == device.tf32_flops


def test_mfu_is_the_time_at_peak_over_the_time_of_whole_steps() -> None:
    part = timeline(
        step(1, 0, 1_000_000),
        step(2, 1_000_000, 2_000_000),
        host(0, 100, "aten::mm", extra=MM),
        call(20, 25, flow_out=1),
        kernel(1000, 2000, "gemm", flow_in=1),
        call(200, 205, flow_out=2),
        kernel(3000, 6000, "flash_fwd", flow_in=2),
        metadata=H100,
    )
    found = analyze_rank_mfu(part)
    assert (found.num_steps, found.time_ns, found.flops) == (1, 1_000_000, FLOPS)
    assert found.flops_by_dtype == {"bf16": FLOPS}
    assert found.mfu == pytest.approx(FLOPS / (get_gpu("h100").bf16_flops or 0) / 1e-3)
    assert found.counted_share == 0.25
    assert [u.name for u in found.uncounted_kernels] == ["flash_fwd"]


def test_mfu_without_a_known_device_is_none() -> None:
    assert analyze_rank_mfu(timeline(kernel(0, 5))).mfu is None


def test_both_gradients_of_a_convolution_have_a_kernel_each() -> None:
    said = {
        "Input Dims": [[8, 16, 32, 32], [8, 3, 32, 32], [16, 3, 3, 3]],
        "Input type": ["c10::BFloat16"] * 3,
        "Concrete Inputs": ["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1",
                            "[True, True, False]"],
    }  # fmt: skip
    each = 2 * 8 * 16 * 32 * 32 * 27
    part = timeline(
        host(0, 100, "aten::convolution_backward", extra=json.dumps(said)),
        call(10, 12, flow_out=1), kernel(1000, 1400, "dgrad_engine", flow_in=1),
        call(20, 22, flow_out=2), kernel(1400, 1500, "nchwToNhwcKernel", flow_in=2),
        call(30, 32, flow_out=3), kernel(1500, 2000, "wgrad_engine", flow_in=3),
    )  # fmt: skip
    flops = {kernel.name: kernel.flops for kernel in analyze_rank_kernels(part).kernels}
    assert flops == {"dgrad_engine": each, "nchwToNhwcKernel": 0, "wgrad_engine": each}
