"""The Pareto front: nobody on it is beaten, and nothing that beats it was left out."""

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.long_run.reliability import Reliability
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan.studies.pareto_front import (
    MIN_SAVING_SHARE,
    ParetoPoint,
    find_pareto_front,
    min_bytes_needed,
)
from meshwright.predict.plan.studies.sweeps import answer_question
from tests.predict.plan.tiny import answered, asked


@pytest.fixture(scope="module")
def points() -> tuple[ParetoPoint, ...]:
    return find_pareto_front(asked(), gpus=(8, 16, 32), memory=(1.0, 0.05, 0.03, 0.02))


def point(time_s: float, memory: int, price: float | None, gpus: int) -> ParetoPoint:
    return ParetoPoint(
        plan=answered().best, time_s=time_s, memory_bytes=memory, price=price, gpus=gpus
    )


def test_beating_is_better_in_something_and_worse_in_nothing() -> None:
    one = point(1, 1, 1, 8)
    assert not one.dominates(one)
    assert one.dominates(point(1, 1, 1, 16))
    assert not one.dominates(point(0.5, 2, 1, 8))
    assert point(1, 1, None, 8).dominates(point(2, 1, None, 8))


def test_nobody_on_the_front_is_beaten(points: tuple[ParetoPoint, ...]) -> None:
    assert len(points) > 3
    assert not any(one.dominates(other) for one in points for other in points)


def test_the_fastest_plan_of_every_count_is_beaten_by_nobody_or_there(
    points: tuple[ParetoPoint, ...],
) -> None:
    times = [one.time_s for one in points]
    assert times == sorted(times)
    for gpus in (8, 16, 32):
        best = answer_question(asked(gpus)).best
        limit_s = asked(gpus).workload.num_steps * best.step.step_s * (1 + MIN_SAVING_SHARE)
        own = [one for one in points if one.gpus <= gpus and one.time_s <= limit_s]
        assert own


def test_less_memory_costs_time(points: tuple[ParetoPoint, ...]) -> None:
    alike = [one for one in points if one.gpus == 8]
    assert len(alike) > 1
    memory = [one.memory_bytes for one in alike]
    assert memory == sorted(memory, reverse=True)


def test_what_is_needed_just_fits() -> None:
    best = answer_question(asked()).best
    need = min_bytes_needed(best.memory)
    question = asked()
    for room, fits in ((need, True), (round(0.99 * need), False)):
        gpu = replace(question.cluster.gpu, memory_bytes=room)
        sized = replace(question, cluster=replace(question.cluster, gpu=gpu))
        assert predict_memory(sized.build_run(best.layout)).fits == fits


def test_time_and_price_are_those_of_the_workloads_tokens() -> None:
    (fastest, *_) = find_pareto_front(asked(), memory=(1.0,))
    training, hourly = asked().workload, asked().cluster.price_per_gpu_hour
    assert hourly is not None
    assert fastest.time_s == training.num_steps * fastest.plan.step.step_s
    assert fastest.price == pytest.approx(fastest.time_s / 3600 * 8 * hourly)


def test_failures_take_time_and_money_where_asked_for() -> None:
    (calm, *_), (rough, *_) = (
        find_pareto_front(asked(), memory=(1.0,), reliability=reliability)
        for reliability in (None, Reliability())
    )
    assert rough.time_s > calm.time_s
    assert (rough.price or 0) > (calm.price or 0)


def test_a_cluster_without_a_price_has_none() -> None:
    free = asked(cluster="meta-llama3")
    assert all(one.price is None for one in find_pareto_front(free, memory=(1.0, 0.05)))


@pytest.mark.parametrize("memory", [(), (0.0,), (1.5,), (-1.0, 0.5)])
def test_shares_that_are_none_are_refused(memory: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="memory"):
        find_pareto_front(asked(), memory=memory)


def test_counts_on_which_nothing_fits_are_left_out_unless_all_are() -> None:
    tight = asked(memory_gb=4.0)
    with pytest.raises(InputError, match="fits"):
        find_pareto_front(replace(tight, cluster=asked(memory_gb=1.0).cluster))
    assert {one.gpus for one in find_pareto_front(tight, gpus=(8, 12, 32), memory=(1.0,))} <= {
        8,
        32,
    }
