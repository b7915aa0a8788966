"""Durations are guessed from what is alike and already over."""

import random

import pytest

from meshwright.policy.job_queue import CountedPool, JobRequest, make_policy
from meshwright.predict.job_queue import (
    DurationPredictor,
    predict_durations,
    simulate_queue,
    summarize_run,
)


def ask(submit_s: float, name: str, user: str = "u", gpus: float = 1) -> JobRequest:
    return JobRequest(
        job_id=f"{name}@{submit_s}", submit_s=submit_s, gpus=gpus, user=user, name=name
    )


def test_the_same_name_counts_more_than_the_same_user() -> None:
    known = DurationPredictor()
    for at in range(10):
        known.update(ask(0, f"short-{at}"), 60)
        known.update(ask(0, f"long-{at}"), 36_000)
    assert known.predict(ask(1, "short-99")) == pytest.approx(60, rel=0.5)
    assert known.predict(ask(1, "long-99")) == pytest.approx(36_000, rel=0.5)
    assert 100 < known.predict(ask(1, "other")) < 30_000


def test_nothing_is_known_before_it_is_over() -> None:
    asks = [ask(0, "a"), ask(5, "a"), ask(2000, "a")]
    first, second, third = predict_durations(asks, [1000.0, 1000.0, 1000.0])
    assert first == second
    assert abs(third - 1000) < abs(first - 1000)


def test_recent_runs_count_most() -> None:
    known = DurationPredictor()
    for took in [100.0] * 20 + [5000.0] * 8:
        known.update(ask(0, "a"), took)
    assert known.predict(ask(1, "a")) > 3000


def test_shortest_first_by_guesses_comes_near_the_oracle() -> None:
    draw = random.Random(0)
    usual = {f"work{at}": draw.choice((30, 300, 3000, 20_000)) for at in range(12)}
    asks, run_s = [], []
    for at in range(1500):
        name = draw.choice(list(usual))
        asks.append(ask(at * 60.0, f"{name}-{at}", user=name[-1], gpus=draw.choice((1, 2, 4))))
        run_s.append(usual[name] * draw.uniform(0.5, 1.5))

    def mean_s(estimates: list[float], policy: str) -> float:
        known = [
            JobRequest(job_id=one.job_id, submit_s=one.submit_s, gpus=one.gpus, estimate_s=guess)
            for one, guess in zip(asks, estimates, strict=True)
        ]
        return summarize_run(
            simulate_queue(known, run_s, CountedPool(192), make_policy(policy))
        ).jct_s.mean

    fifo, oracle = mean_s(run_s, "fifo"), mean_s(run_s, "ssf")
    guessed = mean_s(predict_durations(asks, run_s), "ssf")
    assert oracle <= guessed < fifo
    assert guessed - oracle < 0.35 * (fifo - oracle)
