"""Corrections near measured shapes, none far from them."""

from pathlib import Path

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.predict.cost import (
    Calibration,
    attention_s,
    build_device_costs,
    gemm_s,
    grouped_gemm_bound_s,
    grouped_gemm_s,
    list_measured_devices,
    load_calibration,
    save_calibration,
)
from meshwright.predict.cost.curves import CurveResiduals, GemmCurve
from meshwright.predict.cost.residual_correction import ResidualCorrection
from meshwright.spec.catalog import get_gpu

GPU = get_gpu("h200-141g-sxm")
ONE = CurveResiduals(
    family="products", name="bf16", reach=1.0, likeness=0.5, points=("forward 4096 4096 4096 0.1",)
)
PLAIN = build_device_costs(GPU)


def with_residuals(*residuals: CurveResiduals, grouped: GemmCurve | None = None) -> Calibration:
    return Calibration(gpu=GPU.name, source="here", residuals=residuals, grouped=grouped)


def test_a_measured_shape_is_corrected_by_what_was_left_there() -> None:
    device = build_device_costs(GPU, with_residuals(ONE))
    longer = gemm_s(device, 4096, 4096, 4096) / gemm_s(PLAIN, 4096, 4096, 4096)
    assert longer == pytest.approx(1.1052, rel=1e-3)


def test_corrections_fade_with_the_distance() -> None:
    found = ResidualCorrection(ONE)
    at, near, far = (found.factor("forward", 4096 * n, 4096, 4096) for n in (1, 2, 1024))
    assert at > near > far == pytest.approx(1.0, abs=1e-4)


def test_another_kind_of_product_is_corrected_less() -> None:
    found = ResidualCorrection(ONE)
    forward, other = (found.factor(kind, 4096, 4096, 4096) for kind in ("forward", "weight"))
    assert 1.0 < other < forward


def test_between_shapes_no_more_is_corrected_than_anywhere_seen() -> None:
    points = tuple(f"forward {size} 4096 4096 0.1" for size in (2048, 8192))
    two = msgspec.structs.replace(ONE, points=points, reach=9.0)
    found = ResidualCorrection(two)
    between = found.factor("forward", 4096, 4096, 4096)
    assert between <= max(found.factor("forward", size, 4096, 4096) for size in (2048, 8192))


def test_only_what_has_residuals_changes() -> None:
    device = build_device_costs(GPU, with_residuals(ONE))
    assert gemm_s(device, 4096, 4096, 4096, "fp8-tensorwise") == gemm_s(
        PLAIN, 4096, 4096, 4096, "fp8-tensorwise"
    )
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 128, "seq": 4096}
    assert attention_s(device, **sizes) == attention_s(PLAIN, **sizes)


def test_attention_is_corrected_by_direction_and_mask() -> None:
    left = msgspec.structs.replace(
        ONE, family="attention", name="forward", likeness=0.0,
        points=("causal 8 4096 4096 128 128 0.2",),
    )  # fmt: skip
    device = build_device_costs(GPU, with_residuals(left))
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 128, "seq": 4096}
    assert attention_s(device, **sizes) == pytest.approx(1.2214 * attention_s(PLAIN, **sizes), 1e-3)
    for other in ({"mask": "full"}, {"part": "backward"}, {"kernel": "flash2"}):
        assert attention_s(device, **sizes, **other) == attention_s(PLAIN, **sizes, **other)


def test_grouped_products_may_have_a_curve_of_their_own() -> None:
    own = msgspec.structs.replace(list_measured_devices()[GPU.name].products[0], efficiency=0.4)
    left = msgspec.structs.replace(ONE, family="grouped", points=("forward 8 4096 4096 4096 -0.1",))
    device = build_device_costs(GPU, with_residuals(left, grouped=own))
    found = grouped_gemm_s(device, 8, 4096, 4096, 4096)
    assert found > 1.5 * grouped_gemm_s(PLAIN, 8, 4096, 4096, 4096)
    # No grouped product may be faster than what a search takes for the least.
    flops = 2.0 * 8 * 4096**3
    assert grouped_gemm_bound_s(device, flops, precision="bf16", gradient=False) <= found
    fp8 = {"precision": "fp8-tensorwise"}
    assert grouped_gemm_s(device, 8, 4096, 4096, 4096, **fp8) == grouped_gemm_s(
        PLAIN, 8, 4096, 4096, 4096, **fp8
    )


def test_files_keep_residuals_and_older_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    save_calibration(with_residuals(ONE), path)
    assert load_calibration(path) == with_residuals(ONE)
    old = tmp_path / "old.toml"
    old.write_text(f'gpu = "{GPU.name}"\nsource = "before"\nsustained_slowdown = 1.1\n')
    found = load_calibration(old)
    assert (found.residuals, found.software, found.grouped, found.peaks) == ((), "", None, None)
    assert gemm_s(build_device_costs(GPU, found), 4096, 4096, 4096) == gemm_s(
        PLAIN, 4096, 4096, 4096
    )


@pytest.mark.parametrize("point", ["", "forward", "forward 0.1", "forward 0 8 8 0.1", "f 1 x 0.1"])
def test_a_point_that_cannot_be_read_is_refused(point: str) -> None:
    with pytest.raises(InputError, match="no measured shape"):
        msgspec.structs.replace(ONE, points=(point,))
