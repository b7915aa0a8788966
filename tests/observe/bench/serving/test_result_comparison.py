"""Two results of the same thing differ within noise; a change that is there is found."""

import random

import pytest

from meshwright.observe.bench.serving.result_comparison import compare_bench_runs, pair_runs
from meshwright.observe.bench.serving.serving_metrics import compute_serving_metrics
from meshwright.observe.bench.serving.serving_result import ServingBenchRun
from tests.observe.bench.serving.served_requests import result_of, run_of, served


def _run(seed: int, slower: float = 1.0, name: str = "8 at a time") -> ServingBenchRun:
    rng = random.Random(seed)
    return run_of(
        [
            served(
                index,
                0.1 * index,
                [slower * rng.lognormvariate(4, 0.4), *(rng.gauss(10, 2) for _ in range(20))],
            )
            for index in range(100)
        ],
        name,
    )


def test_the_same_server_twice_is_within_noise() -> None:
    found = [
        line
        for seed in range(5)
        for line in compare_bench_runs(_run(seed), _run(seed + 100)).differences
    ]
    beyond = [line.name for line in found if line.is_significant]
    assert len(found) == 5 * (4 * 3 + 1 + 2)  # of 100 requests only gaps have a 99th percentile
    assert len(beyond) <= 4


def test_a_slower_first_token_is_found_and_nothing_else() -> None:
    lines = {
        line.name: line for line in compare_bench_runs(_run(1), _run(2, slower=1.5)).differences
    }
    for share in ("mean", "p50"):
        line = lines[f"ttft {share}"]
        assert line.is_significant
        assert not line.is_improvement
        assert line.low is not None
        assert line.high is not None
        assert line.low < 0.5 < line.high
    assert not lines["itl p50"].is_significant


def test_the_change_is_that_of_the_figures() -> None:
    lines = {
        line.name: line for line in compare_bench_runs(_run(1), _run(1, slower=2.0)).differences
    }
    line = lines["ttft mean"]
    assert line.change == pytest.approx(1.0, abs=1e-4)
    assert line.second == pytest.approx(2 * line.first, rel=1e-4)


@pytest.mark.parametrize("requests", [7, 40])
def test_figures_are_those_of_each_run_alone(requests: int) -> None:
    rng = random.Random(3)
    run = run_of([served(n, n / 9, [rng.uniform(9, 99), 5, n]) for n in range(requests)])
    latency, compared = compute_serving_metrics(run).latency, 0
    for line in compare_bench_runs(run, run).differences:
        metric, _, share = line.name.partition(" ")
        if metric in latency:
            compared += 1
            wanted = getattr(latency[metric], f"{share}_s")
            assert line.first == line.second == pytest.approx(wanted, rel=1e-9), line.name
    assert compared >= 8


def test_runs_are_compared_where_their_loads_are_the_same() -> None:
    first = result_of(_run(0, name="1 requests/s"), _run(1, name="2 requests/s"))
    second = result_of(_run(2, name="2 requests/s"), _run(3, name="4 requests/s"))
    assert [(a.name, b.name) for a, b in pair_runs(first, second)] == [("2 requests/s",) * 2]


def test_a_run_without_answers_has_nothing_to_compare() -> None:
    failed = run_of([served(0, 0.0, [], error="timed out")])
    assert compare_bench_runs(_run(0), failed).differences == ()


def test_the_same_requests_are_drawn_on_both_sides() -> None:
    def run(offset: float) -> ServingBenchRun:
        rng = random.Random(7)
        return run_of(
            [served(n, n / 10, [rng.uniform(10, 1000) + offset, 10, 10]) for n in range(100)]
        )

    (line,) = (
        line
        for line in compare_bench_runs(run(0.0), run(20.0)).differences
        if line.name == "ttft mean"
    )
    assert line.is_significant  # 4 % of a mean whose own spread is ten times that


def test_a_single_throughput_is_not_judged() -> None:
    at_once = [run_of([served(n, 0.0, [slower] * 5) for n in range(50)]) for slower in (10, 11)]
    lines = {line.name: line for line in compare_bench_runs(*at_once).differences}
    assert "output tokens under load" not in lines
    line = lines["output tokens"]
    assert (line.low, line.is_significant) == (None, False)
    assert line.change == pytest.approx(-1 / 11)
