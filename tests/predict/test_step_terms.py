"""A predicted step split by kind of work: nothing is lost, and each kind is where it belongs."""

import pytest

from meshwright.predict.run import Run
from meshwright.predict.software import MEGATRON, MESHWRIGHT, Software
from meshwright.predict.step import predict_step
from meshwright.predict.step_terms import step_terms
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.work import Work
from meshwright.spec.workload import Training


def run_of(model: str, layout: Layout, software: Software = MESHWRIGHT) -> Run:
    work = Work(
        model=catalog.model(model),
        cluster=catalog.cluster("dgx-h200"),
        layout=layout,
        workload=Training(sequence_length=4096, global_batch=8, tokens=10**9),
    )
    return Run(work, software=software)


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
def test_terms_and_waits_add_up_to_the_step(model: str, layout: Layout, software: Software) -> None:
    run = run_of(model, layout, software)
    step, terms = predict_step(run), step_terms(run)
    assert terms.total_s == pytest.approx(step.step_s, rel=1e-9)
    assert sum(terms.work.values()) + terms.gaps_s == pytest.approx(
        step.compute_s + step.recompute_s + step.optimizer_s, rel=1e-9
    )


def test_full_recompute_adds_to_the_kinds_of_work_it_repeats() -> None:
    once, again = (step_terms(run_of("llama3-8b", layout)) for layout in LAYOUTS[0:3:2])
    # Forward is a third of the products, but the last of each layer runs once.
    grown = again.work["products"] / once.work["products"]
    assert 1.2 < grown < 1.33
    assert again.work["head"] == once.work["head"]
    assert again.work["optimizer"] == once.work["optimizer"]


def test_only_low_precisions_cast() -> None:
    plain, low = (step_terms(run_of("llama3-8b", layout)) for layout in LAYOUTS[:2])
    assert "casts" not in plain.work
    assert low.work["casts"] > 0
    assert low.work["products"] < plain.work["products"]
