"""What a framework can run is learnt from its bridge, and plans are taken as it runs them."""

import pytest

from meshwright.errors import InputError
from meshwright.predict.plan import LayoutSpace, PlanQuestion, find_plans, parse_fixed_fields
from meshwright.predict.plan.framework_target import apply_framework, restrict_to_framework
from meshwright.spec import catalog
from meshwright.spec.bridge import find_bridge
from meshwright.spec.bridge.spec_diff import diff_layouts
from meshwright.spec.workload import TrainingWorkload


def question(*fixed: str, model: str = "llama3.1-8b") -> PlanQuestion:
    return PlanQuestion(
        model=catalog.get_model(model),
        cluster=catalog.get_cluster("h100-superpod").with_gpus(8),
        workload=TrainingWorkload(tokens=1, sequence_length=8192, global_batch=64),
        space=LayoutSpace(fixed=parse_fixed_fields(fixed)),
    )


@pytest.mark.parametrize(
    ("target", "field", "allowed"),
    [
        ("megatron", "schedule", {"1f1b", "interleaved"}),
        ("megatron", "cp_kind", {"ring", "allgather", "ulysses"}),
        ("megatron", "order", {"tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"}),
        ("megatron", "offload", {()}),
        ("nemo", "schedule", {"1f1b", "interleaved"}),
        ("torchtitan", "schedule", {"gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v"}),
        ("torchtitan", "zero", {0, 2, 3}),
        ("torchtitan", "sequence_parallel", {True}),
        ("torchtitan", "recompute_ops", {("layernorm", "mlp_act")}),
        ("deepspeed", "schedule", {"1f1b"}),
        ("deepspeed", "cp_kind", {"ulysses"}),
        ("deepspeed", "zero", {0, 1, 2, 3}),
        ("deepspeed", "recompute", {"none", "full"}),
        ("fsdp2", "recompute", {"none", "full"}),
        ("fsdp2", "ep", {1}),
    ],
)
def test_a_framework_allows_what_its_settings_bring_back(
    target: str, field: str, allowed: set[object]
) -> None:
    narrowed = restrict_to_framework(question(), find_bridge(target))
    assert set(narrowed.space.fixed[field]) == allowed


def test_megatron_has_no_module_for_a_dense_activation() -> None:
    sets = restrict_to_framework(question(), find_bridge("megatron")).space.fixed["recompute_ops"]
    assert sets
    assert not any("mlp_act" in ops for ops in sets)


def test_a_framework_keeps_on_the_host_what_it_can() -> None:
    asked = question("offload=none,optimizer,activations+optimizer")
    assert set(restrict_to_framework(asked, find_bridge("megatron")).space.fixed["offload"]) == {
        (),
        ("optimizer",),
    }


def test_what_the_user_fixed_stays_fixed() -> None:
    narrowed = restrict_to_framework(
        question("schedule=1f1b,zb-v", "tp=2"), find_bridge("megatron")
    )
    assert narrowed.space.fixed["schedule"] == ("1f1b",)
    assert narrowed.space.fixed["tp"] == (2,)


def test_what_the_user_fixed_and_cannot_be_said_is_named() -> None:
    with pytest.raises(InputError, match="precision mxfp8 cannot be said in DeepSpeed JSON"):
        restrict_to_framework(question("precision=mxfp8"), find_bridge("deepspeed"))


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_settled_plans_are_what_the_text_means(target: str) -> None:
    bridge = find_bridge(target)
    found = find_plans(restrict_to_framework(question("tp=2", "cp=1"), bridge), execute=False)
    answer = apply_framework(found, bridge)
    steps = [plan.step.step_s for plan in answer.plans]
    assert steps == sorted(steps)
    assert answer.bound_s == found.bound_s <= steps[0]
    for plan in answer.plans:
        assert plan.memory.fits
        exported = bridge.export_config(plan.layout, answer.question.model, global_batch=64)
        back = bridge.import_config(exported.text, gpus=8).layout
        lost = {one.path for one in diff_layouts(plan.layout, back)}
        assert lost <= {"global_batch"}
