"""What of an exchange is exposed follows from when its buckets are ready."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.step.grad_buckets import (
    RankChunk,
    grad_reduce_end_s,
    param_gather_delay_s,
    predict_dp_comm,
)
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.spec.layout import ScheduleKind, count_rank_parameters
from tests.predict.runs import KINDS, LLAMA, run_of


def held(layers: int, pass_s: float) -> list[RankChunk]:
    return [RankChunk(1.0, layers, 0.0, pass_s)]


RUN = run_of(model=LLAMA, dp=8, zero=1)
LATE = RUN.constants.exposed_bucket_share
SHARE = RUN.constants.comm_sm_share

layers = st.integers(1, 40)
seconds = st.floats(1e-4, 10)


@given(layers, seconds, seconds)
def test_at_least_the_last_bucket_is_exposed_and_at_most_everything(
    count: int, exchange_s: float, pass_s: float
) -> None:
    late = grad_reduce_end_s(RUN, exchange_s, held(count, pass_s)) - pass_s
    assert exchange_s * max(LATE, 1 / count) - 1e-9 <= late <= exchange_s + 1e-9


@given(layers, seconds, seconds)
def test_gathers_ahead_cost_what_reductions_behind_do(
    count: int, exchange_s: float, pass_s: float
) -> None:
    before = param_gather_delay_s(RUN, exchange_s, held(count, pass_s))[0]
    after = grad_reduce_end_s(RUN, exchange_s, held(count, pass_s)) - pass_s
    assert before == pytest.approx(after, rel=0.3)
    assert max(LATE, 1 / count) * exchange_s - 1e-9 <= before <= exchange_s + 1e-9


def test_a_long_exchange_is_exposed_as_far_as_the_pass_is_short() -> None:
    late = grad_reduce_end_s(RUN, 10.0, held(1000, 1.0)) - 1.0
    assert late == pytest.approx(9.0 + SHARE * 1.0, rel=0.01)


def test_what_hides_slows_down_compute() -> None:
    late = grad_reduce_end_s(RUN, 1.0, held(1000, 100.0)) - 100.0
    assert late == pytest.approx(LATE + SHARE * (1 - LATE))


def test_chunks_that_are_done_early_are_reduced_early() -> None:
    together = [RankChunk(0.5, 4, 9.0, 9.5), RankChunk(0.5, 4, 9.5, 10.0)]
    spread = [RankChunk(0.5, 4, 1.0, 1.5), RankChunk(0.5, 4, 9.5, 10.0)]
    assert grad_reduce_end_s(RUN, 3.0, spread) < grad_reduce_end_s(RUN, 3.0, together)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"overlap_gradients": False}, {"overlap_parameters": False}])
def test_lanes_end_when_the_formula_says(kind: ScheduleKind, more: dict[str, Any]) -> None:
    run = run_of(kind, model=LLAMA, dp=64, zero=1, batch=64 * 6, **more)
    step = simulate_step(run)
    assert predict_step(run).step_s == pytest.approx(step.step_s, rel=0.002)
    for rank, parameters in enumerate(count_rank_parameters(run.layout, run.model)):
        own = [bucket for bucket in step.buckets if bucket.rank == rank]
        for gathers, whole in zip((False, True), predict_dp_comm(run, parameters), strict=True):
            some = [bucket for bucket in own if bucket.is_gather == gathers]
            assert sum(bucket.share for bucket in some) == pytest.approx(1)
            spent = sum(bucket.end_s - bucket.start_s for bucket in some)
            assert whole - 1e-9 <= spent <= (1 + SHARE) * whole + 1e-9


@pytest.mark.parametrize("zero", [1, 3])
def test_of_frozen_weights_only_adapters_are_exchanged(zero: int) -> None:
    whole, tuned = (
        run_of(model=LLAMA, dp=8, zero=zero, batch=64, frozen=frozen) for frozen in (False, True)
    )
    number = sum(rank.total for rank in count_trained_parameters(tuned))
    assert number < 0.01 * sum(rank.total for rank in count_trained_parameters(whole))
    assert 0 < predict_step(tuned).dp_s < predict_step(whole).dp_s


def test_a_bubble_hides_the_reductions_of_later_stages() -> None:
    step = simulate_step(run_of(model=LLAMA, dp=64, zero=1, batch=64 * 16))
    ends = [max(b.end_s for b in step.buckets if b.rank == rank) for rank in range(4)]
    assert ends[3] < step.passes_end_s[0] < ends[0] == step.update_start_s[3]
