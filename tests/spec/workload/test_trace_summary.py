import pytest

from meshwright.errors import InputError
from meshwright.spec.workload import (
    ConstantArrivals,
    FixedLength,
    GammaArrivals,
    LogNormalLength,
    RequestTrace,
    ServingWorkload,
    UniformLength,
    WorkloadRequest,
    fit_workload,
    summarize_trace,
)


def trace(*rows: tuple[float, int, int], blocks: tuple[tuple[int, ...], ...] = ()) -> RequestTrace:
    shared = blocks or ((),) * len(rows)
    return RequestTrace(
        requests=tuple(
            WorkloadRequest(
                arrival_s=at, prompt_tokens=p, output_tokens=o, prefix_blocks=b, block_tokens=4
            )
            for (at, p, o), b in zip(rows, shared, strict=True)
        )
    )


def test_figures_of_a_small_trace() -> None:
    summary = summarize_trace(trace((0, 10, 1), (1, 20, 2), (2, 30, 3), (3, 40, 4)))
    assert summary.requests == 4
    assert (summary.duration_s, summary.rate_per_s, summary.arrival_cv) == (3, 1, 0)
    spread = summary.prompt
    assert (spread.mean, spread.min, spread.p50, spread.p99, spread.max) == (
        25, 10, 20, 40, 40,
    )  # fmt: skip


def test_bursts_raise_the_variation_of_the_gaps() -> None:
    # Gaps 0, 0, 3: the mean is 1, the standard deviation √2.
    summary = summarize_trace(trace((0, 1, 1), (0, 1, 1), (0, 1, 1), (3, 1, 1)))
    assert summary.arrival_cv == pytest.approx(2**0.5)


def test_prefix_reuse_counts_leading_tokens_that_came_before() -> None:
    rows = ((0.0, 12, 1), (1.0, 12, 1), (2.0, 6, 1), (3.0, 10, 1))
    # Reused: nothing; blocks 1 and 2 (8 tokens); all of 6 tokens; nothing, as the first is new.
    blocks = ((1, 2, 3), (1, 2, 4), (1, 2), (9, 2, 3))
    summary = summarize_trace(trace(*rows, blocks=blocks))
    assert summary.prefix_reuse_share == (8 + 6) / 40


def test_a_trace_without_times_has_no_rate() -> None:
    untimed = RequestTrace(requests=trace((0, 10, 1)).requests, has_times=False)
    summary = summarize_trace(untimed)
    assert summary.duration_s is summary.rate_per_s is summary.arrival_cv is None


def test_requests_that_come_at_once_have_no_rate() -> None:
    assert summarize_trace(trace((1, 10, 1), (1, 10, 1))).rate_per_s is None


def test_an_empty_trace_has_no_figures() -> None:
    with pytest.raises(InputError, match="holds no requests"):
        summarize_trace(RequestTrace(requests=()))


def test_a_fit_recovers_the_stream_that_made_the_trace() -> None:
    made = ServingWorkload(
        arrival=GammaArrivals(rate_per_s=4, cv=2.0),
        prompt=LogNormalLength(median=500, sigma=1.0),
        output=UniformLength(low=1, high=100),
    )
    found = fit_workload(RequestTrace(requests=tuple(made.generate(1, count=20_000))))
    assert isinstance(found.arrival, GammaArrivals)
    assert found.arrival.rate_per_s == pytest.approx(4, rel=0.1)
    assert found.arrival.cv == pytest.approx(2, rel=0.1)
    assert found.prompt.mean() == pytest.approx(made.prompt.mean(), rel=0.05)
    assert found.prompt.quantile(0.9) == pytest.approx(made.prompt.quantile(0.9), rel=0.05)
    assert found.output.mean() == pytest.approx(50.5, rel=0.03)


def test_a_fit_keeps_the_mean_length_within_half_a_token() -> None:
    rows = [(float(at), 7 * at + 1, at * at) for at in range(1000)]
    found = fit_workload(trace(*rows), bins=50)
    assert found.prompt.mean() == pytest.approx(sum(r[1] for r in rows) / 1000, abs=0.5)
    assert found.output.mean() == pytest.approx(sum(r[2] for r in rows) / 1000, abs=0.5)


def test_a_trace_without_times_is_fitted_with_given_arrivals() -> None:
    untimed = RequestTrace(requests=trace((0, 10, 0), (0, 10, 0)).requests, has_times=False)
    with pytest.raises(InputError, match="give an arrival process"):
        fit_workload(untimed)
    found = fit_workload(untimed, arrival=ConstantArrivals(rate_per_s=2))
    assert found.rate_per_s == 2
    assert found.prompt.quantile(0.5) == FixedLength(tokens=10).quantile(0.5)
