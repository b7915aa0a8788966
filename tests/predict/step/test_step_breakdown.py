"""A predicted step split by kind of work: nothing is lost, and each kind is where it belongs."""

import pytest

from meshwright.predict.step.step_breakdown import break_down_step
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


def run_of(model: str, layout: Layout, software: TrainingFramework = MESHWRIGHT) -> TrainingRun:
    work = JobSpec(
        model=catalog.get_model(model),
        cluster=catalog.get_cluster("dgx-h200"),
        layout=layout,
        workload=TrainingWorkload(sequence_length=4096, global_batch=8, tokens=10**9),
    )
    return TrainingRun(work, framework=software)


LAYOUTS = (
    Layout(microbatch=4),
    Layout(microbatch=4, precision="fp8-tensorwise"),
    Layout(microbatch=4, recompute="full"),
    Layout(microbatch=4, recompute="selective", recompute_ops=("layernorm", "mlp_act")),
    Layout(microbatch=2, tp=2, sequence_parallel=True),
    Layout(microbatch=1, dp=2, zero=1),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("software", [MEGATRON, MESHWRIGHT])
def test_terms_and_waits_add_up_to_the_step(
    model: str, layout: Layout, software: TrainingFramework
) -> None:
    run = run_of(model, layout, software)
    step, terms = predict_step(run), break_down_step(run)
    assert terms.total_s == pytest.approx(step.step_s, rel=1e-9)
    assert sum(terms.kernels_s.values()) + terms.launch_gaps_s == pytest.approx(
        step.compute_s + step.recompute_s + step.optimizer_s, rel=1e-9
    )


def test_full_recompute_adds_to_the_kinds_of_work_it_repeats() -> None:
    once, again = (break_down_step(run_of("llama3-8b", layout)) for layout in LAYOUTS[0:3:2])
    # Forward is a third of the products, but the last of each layer runs once.
    grown = again.kernels_s["gemm"] / once.kernels_s["gemm"]
    assert 1.2 < grown < 1.33
    assert again.kernels_s["head"] == once.kernels_s["head"]
    assert again.kernels_s["optimizer"] == once.kernels_s["optimizer"]


def test_only_low_precisions_cast() -> None:
    plain, low = (break_down_step(run_of("llama3-8b", layout)) for layout in LAYOUTS[:2])
    assert "casts" not in plain.kernels_s
    assert low.kernels_s["casts"] > 0
    assert low.kernels_s["gemm"] < plain.kernels_s["gemm"]
