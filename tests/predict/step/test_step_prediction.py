"""A predicted step obeys physics and moves the way a step should."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.training_framework import (
    EAGER,
    MEGATRON,
    MEGATRON_2021,
    TrainingFramework,
)
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import count_flops
from meshwright.spec.workload import LoRASpec, TrainingWorkload, training_flops

LLAMA = catalog.get_model("llama3.1-8b")
MIXTRAL = catalog.get_model("mixtral-8x7b")
POD = catalog.get_cluster("h100-superpod").with_gpus(1024)


def run_of(layout: Layout, **values: Any) -> TrainingRun:
    given_ = {"model": LLAMA, "cluster": POD, "global_batch": 512, **values}
    model, cluster, batch = (given_.pop(name) for name in ("model", "cluster", "global_batch"))
    training = TrainingWorkload(
        tokens=8192 * batch,
        sequence_length=8192,
        global_batch=batch,
        adapter=given_.pop("adapter", None),
    )
    work = JobSpec(model=model, cluster=cluster, layout=layout, workload=training)
    return TrainingRun(work, **given_)


def step_of(layout: Layout, **values: Any) -> StepPrediction:
    return predict_step(run_of(layout, **values))


def parts_of(step: StepPrediction) -> float:
    return sum(
        float(getattr(step, name))
        for name in step.__struct_fields__
        if name.endswith("_s") and name not in {"step_s", "low_s", "high_s", "tokens_per_s"}
    )


LAYOUTS = st.builds(
    lambda tp, pp, cp, dp, micro, zero, recompute, offload: Layout(
        tp=tp, pp=pp, cp=cp, dp=dp, microbatch=micro, zero=zero, recompute=recompute,
        sequence_parallel=tp > 1, offload=tuple(sorted(offload)),
    ),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 4, 16]),
    micro=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "full"]),
    offload=st.sets(st.sampled_from(["activations", "gradients", "optimizer", "parameters"])),
)  # fmt: skip


@given(LAYOUTS)
def test_no_step_beats_the_peak(layout: Layout) -> None:
    step = step_of(layout)
    assert 0 < step.mfu < 1
    floor = count_flops(LLAMA, 8192).total * 512 * 8192 / (layout.gpus * 989e12)
    assert step.step_s > floor


@given(LAYOUTS)
def test_the_parts_add_up_to_the_step(layout: Layout) -> None:
    step = step_of(layout)
    assert parts_of(step) == pytest.approx(step.step_s, rel=1e-9)


def test_more_replicas_finish_a_batch_sooner() -> None:
    times = [step_of(Layout(dp=dp, zero=1)).step_s for dp in (8, 32, 128)]
    assert times[0] > times[1] > times[2]
    assert times[0] < 4.2 * times[1]


def test_full_recompute_costs_about_one_more_forward() -> None:
    base, full = (
        step_of(Layout(dp=64, zero=1, recompute=kind)) for kind in ("none", "full")
    )  # fmt: skip
    assert 1.2 < full.step_s / base.step_s < 1.4


def test_interleaving_divides_the_bubble() -> None:
    plain = step_of(Layout(pp=4, dp=16, zero=1))
    chunked = step_of(Layout(pp=4, dp=16, zero=1, virtual_stages=4, schedule="interleaved"))
    assert chunked.bubble_s == pytest.approx(plain.bubble_s / 4, rel=0.15)


def test_fp8_is_faster_but_not_twice() -> None:
    bf16, fp8 = (
        step_of(Layout(dp=64, zero=1, precision=precision))
        for precision in ("bf16", "fp8-tensorwise")
    )
    assert 1.2 < bf16.step_s / fp8.step_s < 2


def test_a_slow_network_shows_in_data_parallel() -> None:
    slow = catalog.get_cluster("jean-zay-a100").with_gpus(384)
    fast = catalog.get_cluster("dgx-a100-80g").with_gpus(384)
    layout = Layout(dp=384, zero=1, microbatch=1)
    batch = 384
    assert (
        step_of(layout, cluster=slow, global_batch=batch).dp_s
        > 2 * step_of(layout, cluster=fast, global_batch=batch).dp_s
    )


def test_experts_over_nodes_cost_an_exchange() -> None:
    inside = step_of(Layout(dp=64, ep=8, zero=1), model=MIXTRAL)
    none = step_of(Layout(dp=64, zero=1), model=MIXTRAL)
    assert inside.ep_s > 0
    assert none.ep_s == 0


def test_a_step_is_faster_where_only_adapters_are_trained() -> None:
    frozen = step_of(Layout(dp=8), adapter=LoRASpec(rank=16))
    assert frozen.step_s < step_of(Layout(dp=8)).step_s


def test_frozen_weights_have_no_gradients_that_count_as_useful_work() -> None:
    adapter = LoRASpec(rank=16)
    whole, tuned = step_of(Layout(dp=8)), step_of(Layout(dp=8), adapter=adapter)
    useful = [
        step.mfu * step.step_s / count
        for step, count in (
            (whole, training_flops(LLAMA, 8192, None)), (tuned, training_flops(LLAMA, 8192,
            adapter)),
        )
    ]  # fmt: skip
    assert useful[0] == pytest.approx(useful[1])
    assert training_flops(LLAMA, 8192, adapter) < training_flops(LLAMA, 8192, None)


@pytest.mark.parametrize("slower", [EAGER, MEGATRON_2021])
def test_older_and_plainer_software_is_slower(slower: TrainingFramework) -> None:
    layout = Layout(dp=64, zero=1)
    assert step_of(layout, framework=slower).step_s > step_of(layout, framework=MEGATRON).step_s


def test_hiding_tensor_parallel_communication_pays() -> None:
    layout = Layout(tp=8, dp=8, sequence_parallel=True, zero=1)
    hidden = msgspec.structs.replace(layout, overlap_tp=True)
    assert step_of(hidden).tp_s < step_of(layout).tp_s


def test_a_stream_of_requests_has_no_training_step() -> None:
    with pytest.raises(InputError, match="training workload"):
        TrainingRun(JobSpec(model=LLAMA, cluster=POD))


def test_the_stage_with_the_head_does_more() -> None:
    stages = [chunk.total for chunk in chunk_times(run_of(Layout(pp=4, dp=4)))]
    assert stages[-1].total_s > stages[1].total_s
    assert stages[1].total_s == pytest.approx(stages[2].total_s)
