"""What a calibration changes in a run: curves, and allowances for software that was measured."""

import msgspec
import pytest

from meshwright.predict.cost import (
    Calibration,
    attention_s,
    gemm_s,
    list_measured_devices,
    memory_s,
)
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.training_framework import (
    MEGATRON,
    MESHWRIGHT,
    TrainingFramework,
)
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.workload import TrainingWorkload

GPU = "h200-141g-sxm"
BUILT_IN = list_measured_devices()[GPU]
WORK = JobSpec(
    model=catalog.get_model("llama3.1-8b"),
    cluster=catalog.get_cluster("h200-superpod"),
    layout=Layout(tp=8, dp=1, sequence_parallel=True),
    workload=TrainingWorkload(sequence_length=4096, global_batch=4, tokens=10**9),
)
ATTENTION = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq": 4096}


def calibration(software: str = "meshwright", **fields: object) -> Calibration:
    """Return the built-in curves as if they had just been measured."""
    whole = {
        "products": BUILT_IN.products,
        "attention": BUILT_IN.attention,
        "memory": BUILT_IN.memory,
        "sustained_slowdown": 1.0,
    }
    return Calibration(gpu=GPU, source="here", software=software, **{**whole, **fields})  # type: ignore[arg-type]


def costs(given: Calibration | None, software: TrainingFramework = MESHWRIGHT) -> tuple[float, ...]:
    """Return the seconds of a bf16 product, an fp8 one, attention and a norm."""
    device = TrainingRun(WORK, framework=software, calibration=given).device_costs
    return (
        gemm_s(device, 8192, 8192, 8192),
        gemm_s(device, 8192, 8192, 8192, "fp8-tensorwise"),
        attention_s(device, **ATTENTION),
        memory_s(device, "norm", 1e9),
    )


def test_work_measured_with_our_own_kernels_has_no_allowance() -> None:
    device = TrainingRun(WORK, framework=MESHWRIGHT, calibration=calibration()).device_costs
    found = {curve.precision: curve.efficiency for curve in device.calibration.products}
    assert found == {curve.precision: curve.efficiency for curve in BUILT_IN.products}
    shares = {curve.op: curve.efficiency for curve in device.calibration.memory}
    assert shares == {curve.op: curve.efficiency for curve in BUILT_IN.memory}
    slower = [a / b for a, b in zip(costs(None), costs(calibration()), strict=True)]
    assert min(slower) > 1.1


@pytest.mark.parametrize(
    "software", [MEGATRON, msgspec.structs.replace(MESHWRIGHT, kernel_library="")]
)
def test_software_that_was_not_measured_keeps_its_allowances(software: TrainingFramework) -> None:
    loaded = calibration(sustained_slowdown=BUILT_IN.sustained_slowdown)
    assert costs(loaded, software) == pytest.approx(costs(None, software))


def test_kernels_measured_by_themselves_keep_the_allowances() -> None:
    alone = calibration("", sustained_slowdown=BUILT_IN.sustained_slowdown)
    assert costs(alone) == pytest.approx(costs(None))


def test_only_work_that_was_measured_loses_its_allowance() -> None:
    wide = tuple(curve for curve in BUILT_IN.products if curve.precision == "bf16")
    some = calibration(products=wide, attention=(), memory=())
    product, low, attention, norm = costs(some)
    all_product, *_ = costs(calibration())
    _, default_low, default_attention, default_norm = costs(None)
    assert product == pytest.approx(all_product)
    assert (low, attention, norm) == pytest.approx((default_low, default_attention, default_norm))


def test_a_step_changes_only_where_a_calibration_is_given() -> None:
    slow = tuple(
        msgspec.structs.replace(curve, efficiency=curve.efficiency / 2)
        for curve in BUILT_IN.products
    )
    plain = predict_step(TrainingRun(WORK)).step_s
    assert predict_step(TrainingRun(WORK, calibration=None)).step_s == plain
    empty = Calibration(gpu=GPU, source="nothing was measured")
    assert predict_step(TrainingRun(WORK, calibration=empty)).step_s == plain
    assert (
        predict_step(TrainingRun(WORK, calibration=calibration("", products=slow))).step_s
        > 1.2 * plain
    )
