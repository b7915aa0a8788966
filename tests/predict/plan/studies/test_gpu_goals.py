"""Inverse questions: what is answered does it, and what is next to it does not."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.long_run.long_run import predict_long_run
from meshwright.predict.long_run.reliability import Reliability
from meshwright.predict.plan.studies.gpu_goals import (
    GoalResult,
    find_cheapest_gpus,
    find_largest_model,
    find_max_tokens,
    find_min_gpus,
)
from meshwright.predict.plan.studies.model_scaling import scale_model
from meshwright.spec.model import count_parameters
from tests.predict.plan.tiny import DENSE, asked

TOKENS = 10**13
DAY = 86400.0


def days(reached: GoalResult) -> float:
    assert reached.best.long_run is not None
    return reached.best.long_run.calendar_s / DAY


@pytest.mark.parametrize("deadline_days", [3, 10, 40])
def test_the_fewest_gpus_end_in_time_and_fewer_do_not(deadline_days: float) -> None:
    found = find_min_gpus(asked(tokens=TOKENS), deadline_days * DAY)
    assert days(found) <= deadline_days
    fewer = [trial for trial in found.trials if trial.gpus < found.best.gpus]
    assert all(t.long_run is None or t.long_run.calendar_s > deadline_days * DAY for t in fewer)
    assert len(found.trials) <= 8
    assert "only usual layouts" in found.note


def test_later_deadlines_need_no_more_gpus() -> None:
    counts = [find_min_gpus(asked(tokens=TOKENS), d * DAY).best.gpus for d in (2, 5, 10, 20, 60)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_failures_count_against_a_deadline() -> None:
    question = asked(tokens=TOKENS)
    calm = find_min_gpus(question, 10 * DAY, reliability=Reliability(failures_per_gpu_hour=0.0))
    deadline_s = 1.05 * days(calm) * DAY
    often = Reliability(failures_per_gpu_hour=0.01)
    assert find_min_gpus(question, deadline_s, reliability=often).best.gpus > calm.best.gpus


def test_a_deadline_out_of_reach_names_the_best_there_is() -> None:
    with pytest.raises(InputError, match=r"out of reach: the fastest found takes .* GPUs"):
        find_min_gpus(asked(tokens=TOKENS), 60.0)


def test_a_cluster_that_ends_is_used_up_to_its_end() -> None:
    question = asked(8, tokens=TOKENS, batch=96)
    three = replace(question, cluster=replace(question.cluster, max_nodes=3))
    node_s = days(find_min_gpus(question, 1e3 * DAY)) * DAY
    assert find_min_gpus(three, node_s / 2.2).best.gpus == 24
    with pytest.raises(InputError, match="out of reach"):
        find_min_gpus(three, node_s / 4)


def test_a_batch_that_divides_over_few_gpus_only_is_laid_on_few() -> None:
    question = asked(8, tokens=TOKENS, batch=1, fixed=("tp=1", "cp=1", "pp=1,2,4,8"))
    with pytest.raises(InputError, match="fits"):
        find_min_gpus(question, DAY)
    alone = asked(8, tokens=TOKENS, batch=8, fixed=("tp=1", "cp=1", "pp=1"))
    with pytest.raises(InputError, match=r"out of reach: .* on 8 GPUs"):
        find_min_gpus(alone, DAY)


def test_where_nothing_fits_the_reason_is_given() -> None:
    small = asked(memory_gb=0.5, tokens=TOKENS)
    one = replace(small, cluster=replace(small.cluster, max_nodes=2))
    with pytest.raises(InputError, match="fits"):
        find_min_gpus(one, DAY)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_what_is_no_deadline_is_refused(deadline_s: float) -> None:
    with pytest.raises(InputError, match="deadline_s"):
        find_min_gpus(asked(), deadline_s)


def test_the_cheapest_gpus_end_in_time_and_cost_least_of_all_tried() -> None:
    found = find_cheapest_gpus(asked(tokens=TOKENS), 10 * DAY)
    assert days(found) <= 10
    in_time = [
        t for t in found.trials if t.long_run is not None and t.long_run.calendar_s <= 10 * DAY
    ]
    assert found.best.gpu_hours == min(trial.gpu_hours for trial in in_time)
    fewest = find_min_gpus(asked(tokens=TOKENS), 10 * DAY)
    assert found.best.gpu_hours <= fewest.best.gpu_hours


def test_a_budget_is_spent_to_the_last_step() -> None:
    question = asked(tokens=TOKENS)
    found = find_max_tokens(question, 5000.0)
    best = found.best
    assert best.long_run is not None
    assert best.long_run.price is not None
    assert best.answer is not None
    step = question.workload.tokens_per_step
    assert best.long_run.price <= 5000
    assert best.tokens % step == 0
    more = replace(question.workload, tokens=best.tokens + step)
    plan = best.answer.best
    longer = predict_long_run(replace(plan.job, workload=more), plan.step.step_s)
    assert longer.price is not None
    assert longer.price > 5000


def test_the_answer_to_a_budget_is_asked_with_its_tokens() -> None:
    best = find_max_tokens(asked(tokens=TOKENS), 5000.0).best
    assert best.answer is not None
    assert best.answer.question.workload.tokens == best.tokens
    assert best.answer.best.job.workload == best.answer.question.workload


def test_more_money_buys_more_tokens_and_a_deadline_fewer() -> None:
    question = asked(tokens=TOKENS)
    tokens = [find_max_tokens(question, dollars).best.tokens for dollars in (1e3, 1e4, 1e5)]
    assert all(one < other for one, other in pairwise(tokens))
    hurried = find_max_tokens(question, 1e5, deadline_s=DAY)
    assert hurried.best.tokens < tokens[-1]
    assert days(hurried) <= 1


def test_of_some_counts_the_one_with_most_tokens_is_taken() -> None:
    found = find_max_tokens(asked(tokens=TOKENS), 1e5, gpus=(8, 16, 32), deadline_s=5 * DAY)
    assert len(found.trials) == 3
    assert found.best.tokens == max(trial.tokens for trial in found.trials)


def test_a_budget_without_a_price_or_for_no_step_is_refused() -> None:
    with pytest.raises(InputError, match="has no price"):
        find_max_tokens(asked(cluster="meta-llama3"), 1e6)
    with pytest.raises(InputError, match="pays for no step"):
        find_max_tokens(asked(), 1e-6)


def test_the_largest_scaled_model_is_fast_enough_and_larger_ones_tried_are_not() -> None:
    found = find_largest_model(asked(memory_gb=16.0), 0.4)
    answer = found.best.answer
    assert answer is not None
    assert answer.best.step.mfu >= 0.4
    size = count_parameters(answer.question.model).total
    assert size > count_parameters(DENSE).total
    for trial in found.trials:
        if trial.answer is not None and trial.answer.best.step.mfu >= 0.4:
            assert count_parameters(trial.answer.question.model).total <= size
    assert "depth and width" in found.note


def test_of_models_given_the_largest_that_is_fast_enough_is_taken() -> None:
    models = [scale_model(DENSE, factor) for factor in (1, 4, 64, 4000)]
    found = find_largest_model(asked(memory_gb=16.0), 0.3, models=models)
    assert found.best.model == models[2].name
    assert [trial.model for trial in found.trials] == [models[3].name, models[2].name]


def test_a_model_of_one_shape_is_tried_once() -> None:
    models = [replace(DENSE, name=name) for name in ("one", "other")]
    assert len(find_largest_model(asked(), 0.01, models=models).trials) == 1


def test_an_mfu_out_of_reach_names_the_best_there_is() -> None:
    with pytest.raises(InputError, match=r"no model tried reaches 99%.*tiny reaches"):
        find_largest_model(asked(), 0.99, models=[DENSE])
    with pytest.raises(InputError, match="no share of the peak"):
        find_largest_model(asked(), 40)
