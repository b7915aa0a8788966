"""Doubts: a plan says where it lies outside what has been measured, and nowhere else."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.predict.plan.answer.extrapolation import find_nearest_setup, list_extrapolations
from meshwright.predict.plan.answer.measured_setups import (
    MeasuredSetup,
    MeasuredSetups,
    describe_setup,
    load_measured_setups,
)
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.workload import LoRASpec, TrainingWorkload

MODEL = catalog.get_model("llama3.1-70b")


def work(
    gpus: int = 64, length: int = 8192, adapter: LoRASpec | None = None, **fields: Any
) -> JobSpec:
    usual: dict[str, Any] = {"tp": 4, "pp": 4, "dp": gpus // 16, "zero": 1, "schedule": "1f1b"}
    training = TrainingWorkload(
        tokens=10**12, sequence_length=length, global_batch=256, adapter=adapter
    )
    return JobSpec(
        model=MODEL, cluster=catalog.get_cluster("h100-superpod").with_gpus(gpus),
        layout=Layout(**(usual | fields)), workload=training,
    )  # fmt: skip


def around(work: JobSpec, times: int = 5, **changed: Any) -> MeasuredSetups:
    """Return a record of setups like the plan's, some microbatches apart, that differ as told."""
    own = replace(describe_setup(work), **changed)
    setups = tuple(replace(own, microbatch=own.microbatch + n) for n in range(times))
    return MeasuredSetups(order=load_measured_setups().order, setups=setups)


def test_a_plan_amid_measured_ones_has_no_doubts() -> None:
    assert list_extrapolations(work(), around(work())) == ()


@pytest.mark.parametrize(
    ("fields", "changed", "said"),
    [
        ({"schedule": "dualpipe"}, {"schedule": "1f1b"}, "no measured run has the schedule dual"),
        ({"offload": ("optimizer",)}, {"offload": ""}, "no measured run has optimizer in host"),
        ({"zero": 3}, {"zero": 1}, "no measured run has ZeRO 3 beside a pipeline"),
        ({"precision": "fp8-blockwise"}, {"precision": "bf16"}, "fp8-blockwise GEMMs on sm_90"),
        ({"shard": 2}, {"hybrid": False}, "no measured run has states sharded within groups"),
        ({"adapter": LoRASpec(rank=8)}, {"adapter": False}, "no measured run has adapters"),
        ({"cp": 2, "dp": 2, "cp_kind": "ulysses"}, {}, "ulysses is predicted only"),
        ({"order": "pp-tp-cp-ep-dp"}, {}, "in the order tp-dp-pp; pp-tp-dp is predicted only"),
        ({"gpus": 128}, {"gpus": 64}, "128 GPUs: measured dense models end at 64"),
        ({"length": 2048}, {"length": 8192}, "2,048 tokens to a sequence: measured dense models"),
        ({}, {"gpu": "h200"}, "no measured run has GPUs of the kind h100"),
    ],
)  # fmt: skip
def test_what_lies_outside_is_named(
    fields: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    plan = work(**fields)
    (doubt,) = list_extrapolations(plan, around(plan, **changed))
    assert said in doubt


def test_a_choice_that_few_made_is_named_with_their_number() -> None:
    plan = work(schedule="zb-h1")
    few, many = around(plan, 2), around(plan, 5, schedule="1f1b")
    both = replace(few, setups=few.setups + many.setups)
    assert list_extrapolations(plan, both) == ("measured setups that have the schedule zb-h1: 2",)


def test_an_order_of_axes_that_have_one_rank_does_not_matter() -> None:
    plan = work(order="cp-tp-ep-dp-pp")
    assert list_extrapolations(plan, around(plan)) == ()


def test_usual_sizes_that_nobody_ran_together_are_far() -> None:
    plan = work(gpus=256, tp=8, pp=8, dp=4)
    own = describe_setup(plan)
    spread = [replace(own, tp=1, gpus=16, microbatch=n) for n in range(1, 6)]
    spread += [replace(own, pp=1, gpus=2048, microbatch=n) for n in range(1, 6)]
    (doubt,) = list_extrapolations(plan, MeasuredSetups(order=(), setups=tuple(spread)))
    assert "the nearest measured run is 6 doublings away: gpus 2,048 instead of 256" in doubt


def test_the_nearest_setup_of_the_shipped_record_is_itself() -> None:
    setups = load_measured_setups().setups
    for own in setups[:: len(setups) // 20]:
        found = find_nearest_setup(own, setups)
        assert found is not None
        assert found[0] == 0


def test_another_architecture_is_not_near() -> None:
    own: MeasuredSetup = replace(describe_setup(work()), arch="sm_999")
    assert find_nearest_setup(own, load_measured_setups().setups) is None


def test_the_shipped_record_knows_common_layouts_and_no_dualpipe() -> None:
    assert not any("schedule" in doubt for doubt in list_extrapolations(work()))
    dual = list_extrapolations(work(schedule="dualpipe"))
    assert "no measured run has the schedule dualpipe" in dual
