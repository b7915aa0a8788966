"""A step of measured parts is simulated as any other: only lengths are given, not found."""

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.event_sim.step_simulation import SimulatedStep, simulate_step
from meshwright.predict.step.block_comm import BlockComm
from meshwright.predict.step.measured_costs import MeasuredCosts, MeasuredLayer, SizeCurve
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from meshwright.spec.workload import TrainingWorkload

MODEL = build_decoder_model("tiny", layers=4, hidden=8, heads=2, ffn=16, vocab=32)
LAYER = MeasuredLayer(forward_s=1.0, backward_s=2.0, dgrad_s=1.0, wgrad_s=1.0)
PIECES = MeasuredCosts(blocks={"dense": LAYER})


def run_of(layout: Layout, measured: MeasuredCosts = PIECES, sequences: int = 4) -> TrainingRun:
    step = TrainingWorkload(sequence_length=16, global_batch=sequences, tokens=16 * sequences)
    cluster = catalog.get_cluster("cpu-host")
    work = JobSpec(model=MODEL, cluster=cluster, layout=layout, workload=step)
    return TrainingRun(work, framework=MESHWRIGHT, measured=measured)


def simulated(
    layout: Layout, measured: MeasuredCosts = PIECES, sequences: int = 4
) -> SimulatedStep:
    return simulate_step(run_of(layout, measured, sequences))


def test_one_stage_takes_the_sum_of_its_passes() -> None:
    # 4 microbatches through 4 layers of 1 s forward and 2 s backward.
    assert simulated(Layout()).step_s == pytest.approx(4 * 4 * 3.0)


def test_1f1b_has_the_bubble_that_is_known_of_it() -> None:
    # (stages - 1) passes each way are waited for: (m + p - 1) (F + B), arXiv 2104.04473, 2.2.
    step = simulated(Layout(pp=2))
    assert step.step_s == pytest.approx((4 + 1) * 2 * 3.0)
    assert step.idle_s == pytest.approx((6.0, 6.0))


def test_messages_lengthen_the_way_there_and_back() -> None:
    sent = replace(
        PIECES, stage_transfer=SizeCurve(((512.0, 0.5),))
    )  # 16 tokens of 8 numbers of 4 bytes
    assert simulated(Layout(pp=2), sent, 1).step_s == pytest.approx(2 * 6.0 + 2 * 0.5)


def test_message_takes_time_from_the_rank_at_each_end() -> None:
    busy = replace(PIECES, stage_transfer_cpu=SizeCurve(((512.0, 0.25),)))
    assert simulated(Layout(pp=2), busy, 1).step_s == pytest.approx(2 * (6.0 + 2 * 0.25))


def test_split_backward_takes_its_own_time() -> None:
    slow = replace(LAYER, dgrad_s=1.5)
    step = simulated(Layout(pp=2, schedule="zb-h1"), MeasuredCosts(blocks={"dense": slow}))
    ops = step.actions.op
    lengths = step.actions.end_s - step.actions.start_s
    assert lengths[ops == 2] == pytest.approx(2 * 1.5)
    assert lengths[ops == 3] == pytest.approx(2 * 1.0)


def test_whole_backward_does_not_pay_for_a_split_one() -> None:
    slow = replace(LAYER, dgrad_s=1.5)
    measured = MeasuredCosts(blocks={"dense": slow})
    assert simulated(Layout(pp=2), measured).step_s == simulated(Layout(pp=2)).step_s


def test_collectives_of_a_layer_are_waited_for_in_its_passes() -> None:
    layer = replace(LAYER, comm=BlockComm(tp_forward_s=0.5, tp_backward_s=1.0))
    measured = MeasuredCosts(blocks={"dense": layer})
    assert simulated(Layout(), measured, 1).step_s == pytest.approx(4 * (3.0 + 1.5))


def test_embedding_and_head_belong_to_the_ends() -> None:
    ends = replace(
        PIECES,
        embedding=MeasuredLayer(forward_s=0.25),
        head=MeasuredLayer(forward_s=1.0, backward_s=1.0),
    )
    step = simulated(Layout(pp=2), ends, 1)
    assert step.busy_s == pytest.approx((6.25, 8.0))


def test_recompute_lengthens_backward() -> None:
    layer = replace(LAYER, recompute_s=0.75)
    measured = MeasuredCosts(blocks={"dense": layer})
    assert simulated(Layout(recompute="full"), measured, 1).step_s == pytest.approx(4 * 3.75)


def test_gradients_are_collected_and_exchanged() -> None:
    measured = replace(
        PIECES,
        collectives={"all_reduce 2": SizeCurve(((1.0, 0.5), (1e9, 0.5)))},
        bucket_copy=SizeCurve(((1.0, 0.25), (1e9, 0.25))),
    )
    run = run_of(Layout(dp=2, overlap_gradients=False), measured)
    assert simulate_step(run).step_s == pytest.approx(2 * 12.0 + 0.75)


def test_update_takes_time_by_parameter_and_once() -> None:
    measured = replace(PIECES, update_s_per_parameter=1e-3, fixed_step_s=0.5)
    run = run_of(Layout(), measured, 1)
    (updated,) = simulate_step(run).optimizer_s
    plain = simulate_step(run_of(Layout(), replace(PIECES, update_s_per_parameter=1e-3), 1))
    assert updated == pytest.approx(plain.optimizer_s[0] + 0.5)
    assert plain.optimizer_s[0] > 0


def test_ranks_of_our_trainer_end_zero_bubble_schedules_together() -> None:
    step = simulated(Layout(pp=2, schedule="zb-h1"))
    assert step.first_start_s == (0.0, 0.0)
    assert len(set(step.update_start_s)) == 1


def test_closed_form_says_the_same() -> None:
    layout = Layout(pp=2)
    assert predict_step(run_of(layout)).step_s == pytest.approx(simulated(layout).step_s)


@pytest.mark.parametrize(
    ("size", "seconds"), [(1.0, 1.0), (10.0, 1.0), (15.0, 1.5), (20.0, 2.0), (40.0, 4.0)]
)
def test_curve_is_straight_between_points_and_beyond_the_last(size: float, seconds: float) -> None:
    assert SizeCurve(((10.0, 1.0), (20.0, 2.0))).predict_s(size) == pytest.approx(seconds)


def test_curve_of_one_point_grows_with_size() -> None:
    assert SizeCurve(((10.0, 1.0),)).predict_s(30.0) == pytest.approx(3.0)


@pytest.mark.parametrize("points", [(), ((2.0, 1.0), (1.0, 1.0))])
def test_curve_that_does_not_grow_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InputError, match="curve"):
        SizeCurve(points)


def test_collective_that_was_not_measured_is_named() -> None:
    with pytest.raises(InputError, match="all_gather among 4 ranks was not measured"):
        PIECES.collective_s("all_gather", 4, 1.0)
