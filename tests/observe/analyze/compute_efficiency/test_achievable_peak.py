"""What a device was measured to reach takes the place of its peaks."""

import pytest

from meshwright.observe.analyze.compute_efficiency.achievable_peak import (
    apply_measured_peaks,
    compute_achievable_mfu,
)
from meshwright.observe.analyze.compute_efficiency.mfu import RankMfu
from meshwright.predict.cost import Calibration
from meshwright.predict.cost.curves import GemmCurve, MemoryCurve
from meshwright.spec.catalog import get_gpu

H200 = get_gpu("h200")


def curve(precision: str, efficiency: float) -> GemmCurve:
    return GemmCurve(
        precision=precision, efficiency=efficiency, bandwidth=0.8, launch_s=3e-6, fill_k=100.0,
        tail=0.2, tile_penalty=0.02, split_penalty=2.0,
    )  # fmt: skip


FOUND = Calibration(
    gpu=H200.name,
    source="here",
    products=(curve("bf16", 0.75), curve("fp8-tensorwise", 0.7), curve("fp8-rowwise", 0.6)),
    memory=(MemoryCurve(op="copy", efficiency=0.9), MemoryCurve(op="permute", efficiency=1.5)),
)


def rank(**by_dtype: float) -> RankMfu:
    return RankMfu(
        rank=0, device=H200.name, num_steps=1, time_ns=10**9, flops=sum(by_dtype.values()),
        flops_by_dtype=by_dtype, mfu=0.4, counted_share=1.0, uncounted_kernels=(),
    )  # fmt: skip


def test_the_best_of_each_kind_counts_and_the_rest_is_the_catalog_s() -> None:
    best = apply_measured_peaks(H200, FOUND)
    assert best.bf16_flops == pytest.approx(0.75 * (H200.bf16_flops or 0))
    assert best.fp8_flops == pytest.approx(0.7 * (H200.fp8_flops or 0))
    assert best.memory_bytes_per_s == pytest.approx(0.9 * H200.memory_bytes_per_s)
    assert best.tf32_flops == H200.tf32_flops


def test_mfu_grows_by_what_was_measured_below_the_peak() -> None:
    best = apply_measured_peaks(H200, FOUND)
    assert compute_achievable_mfu(rank(bf16=1e14), H200, best) == pytest.approx(0.4 / 0.75)
    mixed = compute_achievable_mfu(rank(bf16=1e14, fp8=1e14), H200, best)
    assert mixed is not None
    assert 0.4 / 0.75 < mixed < 0.4 / 0.7


def test_products_that_nobody_measured_have_no_share() -> None:
    assert compute_achievable_mfu(rank(fp32=1e13), H200, apply_measured_peaks(H200, FOUND)) is None
