"""Latencies, throughput and goodput are those of the requests; failures are counted by cause."""

import pytest

from meshwright.errors import InputError
from meshwright.observe.bench.serving.serving_metrics import (
    compute_serving_metrics,
    compute_throughput_over_time,
    meets_slo,
    parse_slo,
)
from tests.observe.bench.serving.served_requests import run_of, served


def test_figures_of_two_requests() -> None:
    run = run_of([served(0, 0.0, [100, 10, 30]), served(1, 1.0, [300, 20, 680])])
    found = compute_serving_metrics(run)
    assert found.duration_s == pytest.approx(2.0)
    assert found.latency["ttft"].mean_s == pytest.approx(0.2)
    assert found.latency["itl"].samples == 4
    assert found.latency["itl"].p50_s == pytest.approx(0.025)
    assert found.latency["tpot"].max_s == pytest.approx(0.35)
    assert found.latency["e2e"].max_s == pytest.approx(1.0)
    assert found.output_tokens_per_s == pytest.approx(3.0)
    assert found.total_tokens_per_s == pytest.approx(13.0)
    assert found.requests_per_s == pytest.approx(1.0)
    assert found.request_goodput is None


def test_what_came_while_more_were_sent_leaves_out_the_tail() -> None:
    run = run_of([served(0, 0.0, [100, 400, 500]), served(1, 1.1, [5000])])
    assert compute_serving_metrics(run).steady_output_tokens_per_s == pytest.approx(3 / 1.0)
    assert (
        compute_serving_metrics(run_of([served(0, 0.0, [100])])).steady_output_tokens_per_s is None
    )


def test_requests_of_a_ramp_count_for_nothing() -> None:
    run = run_of([served(0, 0.0, [900], in_metrics=False), served(1, 5.0, [100])])
    found = compute_serving_metrics(run)
    assert (found.sent, found.latency["ttft"].samples) == (1, 1)
    assert found.duration_s == pytest.approx(0.1)


def test_failures_have_causes_and_no_latencies() -> None:
    broken = served(1, 0.0, [], error="HTTP 429", end_s=9.0)
    found = compute_serving_metrics(run_of([served(0, 0.0, [100]), broken]), {"ttft": 1.0})
    assert found.errors == {"HTTP 429": 1}
    assert (found.sent, found.completed, found.latency["ttft"].samples) == (2, 1, 1)
    assert found.duration_s == pytest.approx(9.0)
    assert found.goodput_share == pytest.approx(0.5)


def test_a_run_without_any_answer_has_figures_too() -> None:
    found = compute_serving_metrics(run_of([served(0, 0.0, [], error="timed out")]))
    assert (found.completed, found.latency, found.output_tokens_per_s) == (0, {}, 0.0)


def test_lengths_that_were_not_asked_for_are_counted() -> None:
    run = run_of(
        [served(0, 0.0, [1], requested_output_tokens=5), served(1, 0.0, [1], prompt_tokens=11)]
    )
    found = compute_serving_metrics(run)
    assert (found.num_output_length_mismatches, found.num_prompt_length_mismatches) == (1, 1)


def test_goodput_needs_every_part_of_the_objective() -> None:
    one = served(0, 0.0, [100, 10, 10])
    assert meets_slo(one, {"ttft": 0.1, "itl": 0.01, "tpot": 0.01, "e2e": 0.12})
    for name in ("ttft", "itl", "tpot", "e2e"):
        assert not meets_slo(one, {name: 0.001})


def test_a_single_token_has_no_gap_to_break_an_objective_with() -> None:
    assert meets_slo(served(0, 0.0, [100]), {"itl": 0.0, "tpot": 0.0})


def test_an_objective_is_read_from_words() -> None:
    assert parse_slo("ttft=500ms, itl=50ms", "--slo") == {"ttft": 0.5, "itl": 0.05}
    for text in ("", "tfft=1s", "ttft=soon"):
        with pytest.raises(InputError, match="--slo"):
            parse_slo(text, "--slo")


def test_an_objective_without_a_unit_is_refused_with_both() -> None:
    with pytest.raises(InputError, match="ttft=500ms or ttft=500s"):
        parse_slo("ttft=500,itl=40ms", "--slo")
    with pytest.raises(InputError, match="no unit"):
        parse_slo("itl=0.05", "--slo")


def test_rates_over_time_add_up_to_all_tokens() -> None:
    run = run_of([served(0, 0.0, [100] * 20), served(1, 0.5, [50] * 10)])
    rates = compute_throughput_over_time(run, 10)
    assert sum(rate for _, rate in rates) * 2.0 / 10 == pytest.approx(30)
