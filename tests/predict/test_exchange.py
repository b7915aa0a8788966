"""Every field of a layout that decides who talks to whom shows in the step."""

from typing import Any

import pytest

from meshwright.predict import StepPrediction, TrainingRun, predict_step
from meshwright.predict.step.block_comm import ring_attention_s
from meshwright.spec import JobSpec, Layout, TrainingWorkload, catalog
from meshwright.spec.model import AttentionSpec

POD = catalog.get_cluster("h100-superpod")


def run_of(model: str = "llama3.1-70b", batch: int = 512, **fields: Any) -> TrainingRun:
    layout = Layout(**fields)
    step = TrainingWorkload(tokens=1, sequence_length=8192, global_batch=batch)
    cluster = POD.with_gpus(layout.gpus)
    return TrainingRun(
        JobSpec(model=catalog.get_model(model), cluster=cluster, layout=layout, workload=step)
    )


def step_of(**fields: Any) -> StepPrediction:
    return predict_step(run_of(**fields))


def test_a_ring_that_leaves_the_node_runs_at_the_pace_of_its_slowest_link() -> None:
    inside, across = run_of(cp=8, dp=4), run_of(cp=16, dp=2)
    mixer = across.model.blocks[0].mixer
    assert isinstance(mixer, AttentionSpec)
    # Half the keys per rank, about twice the hops: only the link makes the difference.
    assert ring_attention_s(across, mixer) > 4 * ring_attention_s(inside, mixer)


def test_copies_of_sharded_states_add_up_among_each_other() -> None:
    for zero in (1, 2):
        whole, hybrid = step_of(dp=512, zero=zero), step_of(dp=512, zero=zero, shard=8)
        assert hybrid.dp_s != pytest.approx(whole.dp_s, rel=1e-3)
        assert hybrid.dp_s > 0


def test_experts_that_no_other_rank_holds_are_not_gathered() -> None:
    spread = {"model": "deepseek-v3", "dp": 256, "expert_tp": 1}
    alone, shared = step_of(**spread, ep=256, zero=3), step_of(**spread, ep=64, zero=3)
    assert alone.dp_s < shared.dp_s / 2


@pytest.mark.parametrize("fields", [{}, {"shard": 8}, {"pp": 4, "overlap_gradients": False}])
def test_zero_2_is_zero_1_where_there_is_one_microbatch(fields: dict[str, Any]) -> None:
    dp = 512 // fields.get("pp", 1)
    one, two = (step_of(dp=dp, zero=zero, batch=dp, **fields) for zero in (1, 2))
    assert two == one


def test_zero_2_scatters_gradients_after_every_microbatch() -> None:
    one, two = ([step_of(dp=64, zero=z, batch=64 * n).dp_s for n in (4, 5, 6)] for z in (1, 2))
    assert one[2] == pytest.approx(one[0])
    each = two[1] - two[0]
    assert two[2] - two[1] == pytest.approx(each)
    assert two[0] - one[0] == pytest.approx(3 * each)
    assert each > 0


def test_scatters_hide_behind_long_backwards_but_for_the_last_layer_and_the_chip_they_take() -> (
    None
):
    short, long = (step_of(dp=8, zero=2, batch=8 * 4 * micro, microbatch=micro) for micro in (1, 8))
    assert long.dp_s <= short.dp_s
    assert long.dp_s > 0
    apart = step_of(dp=8, zero=2, batch=8 * 4 * 8, microbatch=8, overlap_gradients=False)
    assert apart.dp_s > 1.5 * long.dp_s


@pytest.mark.parametrize("switch", ["overlap_gradients", "overlap_parameters"])
def test_fully_sharded_exchange_hides_only_where_it_may(switch: str) -> None:
    fields = {"dp": 64, "zero": 3, "batch": 64}
    assert step_of(**fields, **{switch: False}).dp_s > step_of(**fields).dp_s
