"""The shipped functions against the figures kept in `validation/operators`."""

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from meshwright.predict.cost import (
    attention_s,
    build_device_costs,
    gemm_s,
    grouped_gemm_s,
    linear_s,
)
from meshwright.predict.cost.device_costs import DeviceCosts
from meshwright.spec.catalog.hardware import get_gpu

FOLDER = Path(__file__).resolve().parents[3] / "validation" / "operators"


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, Any]]]:
    return json.loads((FOLDER / "h200_measured.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def forms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("operator_forms", FOLDER / "forms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def h200() -> DeviceCosts:
    return build_device_costs(get_gpu("h200"))


def errors(predicted: list[float], rows: list[float]) -> tuple[float, float]:
    ratios = [p / r - 1.0 for p, r in zip(predicted, rows, strict=True)]
    return statistics.mean(map(abs, ratios)), statistics.mean(ratios)


@pytest.mark.parametrize(("part", "field"), [("forward", "tn_s"), ("input_gradient", "nn_s")])
def test_products_fitted_to_tables_meet_measured_ones(
    measured: Any, h200: DeviceCosts, part: Any, field: str
) -> None:
    rows = measured["products"]
    predicted = [linear_s(h200, r["m"], r["n"], r["k"], part=part) for r in rows]
    error, bias = errors(predicted, [r[field] for r in rows])
    assert error < 0.035
    assert abs(bias) < 0.02


def test_weight_gradients_meet_measured_ones(measured: Any, h200: DeviceCosts) -> None:
    rows = [r for r in measured["products"] if "nt_accumulate_s" in r]
    predicted = [linear_s(h200, r["m"], r["n"], r["k"], part="weight_gradient") for r in rows]
    error, bias = errors(predicted, [r["nt_accumulate_s"] for r in rows])
    assert error < 0.065
    assert abs(bias) < 0.03


def test_fp8_products_meet_measured_ones(measured: Any, h200: DeviceCosts) -> None:
    rows = measured["products_fp8"]
    predicted = [gemm_s(h200, r["m"], r["n"], r["k"], "fp8-tensorwise") for r in rows]
    error, _ = errors(predicted, [r["tensorwise_fast_s"] for r in rows])
    assert error < 0.03


@pytest.mark.parametrize(
    ("part", "field"),
    [("forward", "forward_s"), ("input_gradient", "input_gradient_s")],
)
def test_grouped_products_meet_measured_ones(
    measured: Any, h200: DeviceCosts, part: Any, field: str
) -> None:
    rows = measured["grouped"]
    predicted = [
        grouped_gemm_s(h200, r["experts"], r["tokens"], r["n"], r["k"], part=part) for r in rows
    ]
    error, bias = errors(predicted, [r[field] for r in rows])
    assert error < 0.06
    assert abs(bias) < 0.03


@pytest.mark.parametrize(("kernel", "name"), [("native", "cudnn"), ("flash2", "flash2")])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_attention_meets_measured_calls(
    measured: Any, h200: DeviceCosts, kernel: Any, name: str, part: Any
) -> None:
    rows = [
        r
        for r in measured["attention"]
        if f"{name}_both_s" in r and (part == "forward" or r["causal"] or r["d"] == r["dv"])
    ]
    times = [
        r[f"{name}_forward_s"]
        if part == "forward"
        else r[f"{name}_both_s"] - r[f"{name}_forward_s"]
        for r in rows
    ]
    predicted = [
        attention_s(
            h200,
            batch=r["b"],
            heads=r["h"],
            kv_heads=r["kv"],
            head_dim=r["d"],
            value_dim=r["dv"],
            seq=r["s"],
            mask="causal" if r["causal"] else "full",
            part=part,
            kernel=kernel,
        )
        for r in rows
    ]
    error, bias = errors(predicted, times)
    assert error < 0.05
    assert abs(bias) < 0.02


def test_attention_meets_the_flash_attention_3_paper() -> None:
    rows = json.loads((FOLDER / "published_attention.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if row.get("name") == "cuDNN":  # the paper's, of 2024, was slower than today's
            continue
        device = build_device_costs(get_gpu(row["gpu"]))
        heads = 2048 // row["head_dim"]
        for seq, tflops in row["tflops"].items():
            flops = 2 * 2 * 16384 * int(seq) * 2048 * (2.5 if row["part"] == "backward" else 1)
            time_s = attention_s(
                device,
                batch=16384 // int(seq),
                heads=heads,
                kv_heads=heads,
                head_dim=row["head_dim"],
                seq=int(seq),
                mask="full",
                part=row["part"],
                kernel=row["kernel"],
            )
            assert flops / time_s / 1e12 == pytest.approx(tflops, rel=0.08), (row, seq)


@pytest.mark.parametrize(("name", "precision"), [("a100-80g-sxm", "bf16"), ("h200", "fp8-rowwise")])
def test_the_forms_that_were_fitted_are_the_functions_that_ship(
    forms: ModuleType, name: str, precision: str
) -> None:
    device = build_device_costs(get_gpu(name))
    curve = next(c for c in device.calibration.products if c.precision == precision)
    constants = {
        name: getattr(curve, name)
        for name in (
            "efficiency",
            "bandwidth",
            "launch_s",
            "fill_k",
            "tail",
            "tile_penalty",
            "split_penalty",
        )
    }
    shapes = np.random.default_rng(0).integers(1, 200, (200, 3)) * 64
    shapes[:50, 0] //= 4
    hardware = (device.gpu.peak_flops(precision), device.bytes_per_s, device.sms)
    fitted = forms.product_s(
        constants,
        hardware,
        tuple(shapes.T.astype(float)),
        input_bytes=2.0 if precision == "bf16" else 1.0,
        whole=curve.whole,
    )
    shipped = [gemm_s(device, int(m), int(n), int(k), precision) for m, n, k in shapes]
    assert fitted == pytest.approx(shipped)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_attention_form_is_the_function_that_ships(forms: ModuleType, part: Any) -> None:
    device = build_device_costs(get_gpu("h200"))
    curve = device.get_attention_curve("native", part)
    names = ("efficiency", "softmax_dims", "fill_keys", "tail", "wave", "launch_s", "pad_dims")
    constants = {name: float(getattr(curve, name)) for name in names}
    cases = [
        (b, h, g, d, dv, s, causal, window)
        for b, h, g in ((1, 32, 8), (4, 4, 1))
        for d, dv in ((128, 128), (192, 128), (96, 96))
        for s in (512, 2048, 16384)
        for causal, window in ((True, 0), (False, 0), (True, 1024))
    ]
    fields = ("batch", "heads", "kv_heads", "head_dim", "value_dim", "seq", "causal", "window")
    rows = {
        name: np.array([case[i] for case in cases], dtype=bool if name == "causal" else float)
        for i, name in enumerate(fields)
    }
    hardware = (device.attention_peak_flops, device.bytes_per_s, device.sms)
    fitted = forms.attention_s(constants, hardware, rows, part == "backward")
    shipped = [
        attention_s(
            device,
            batch=b,
            heads=h,
            kv_heads=g,
            head_dim=d,
            value_dim=dv,
            seq=s,
            mask="causal" if causal else "full",
            window=window or None,
            part=part,
        )
        for b, h, g, d, dv, s, causal, window in cases
    ]
    assert fitted == pytest.approx(shipped)
