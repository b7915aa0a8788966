"""Curves: ranges are read or refused, every point has an answer or a reason, shapes make sense."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.long_run.reliability import Reliability
from meshwright.predict.plan import PlanAnswer, PlanQuestion
from meshwright.predict.plan.studies import sweeps
from meshwright.predict.plan.studies.sweeps import (
    analyze_sensitivity,
    answer_question,
    parse_range,
    run_sweep,
    vary_question,
)
from tests.predict.plan.tiny import answered, asked


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("256..16384", (256, 512, 1024, 2048, 4096, 8192, 16384)),
        ("256,512,1024", (256, 512, 1024)),
        ("8", (8,)),
        ("8..8", (8,)),
        ("8..40", (8, 16, 32, 40)),
        (" 64 .. 128 , 96 ", (64, 96, 128)),
        ("1k..4k", (1000, 2000, 4000)),
        ("32,8,32", (8, 32)),
    ],
)
def test_ranges_are_read(text: str, values: tuple[int, ...]) -> None:
    assert parse_range(text) == values


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "a value is missing"),
        ("8,", "a value is missing"),
        ("1024..8", "ends before it begins"),
        ("0..8", "begins below 1"),
        ("8..", "not a count"),
        ("many", "not a count"),
        ("1.5", "not a whole number"),
    ],
)
def test_what_is_no_range_is_refused_with_a_fix(text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_range(text, "--gpus")
    assert [(p.where, what in p.what, bool(p.fix)) for p in caught.value.problems] == [
        ("--gpus", True, True)
    ]


def test_every_fault_of_a_range_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        parse_range("8..4,x")
    assert len(caught.value.problems) == 2


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_range_rises_from_its_beginning_to_its_end_by_doublings_at_most(a: int, b: int) -> None:
    low, high = sorted((a, b))
    values = parse_range(f"{low}..{high}")
    assert (values[0], values[-1]) == (low, high)
    assert all(one < other <= 2 * one for one, other in pairwise(values))


def test_a_question_is_varied_in_one_thing() -> None:
    question = asked(8)
    assert vary_question(question, "gpus", 32).gpus == 32
    assert vary_question(question, "batch", 8).workload.global_batch == 8
    assert vary_question(question, "length", 512).workload.sequence_length == 512
    assert vary_question(vary_question(question, "gpus", 32), "gpus", 8) == question


def test_half_a_node_and_unknown_things_are_refused() -> None:
    with pytest.raises(InputError, match="use 16"):
        vary_question(asked(8), "gpus", 12)
    with pytest.raises(InputError, match="gpus"):
        vary_question(asked(8), "gpu", 16)


def test_a_sweep_answers_every_question_in_order() -> None:
    points = run_sweep((n, asked(n)) for n in (8, 16, 32))
    assert [point.value for point in points] == [8, 16, 32]
    speeds = [point.tokens_per_s or 0 for point in points]
    assert speeds == sorted(speeds)
    assert all(
        point.dollars_per_trillion_tokens and point.mfu and not point.exact for point in points
    )


def test_a_point_without_a_layout_says_why() -> None:
    fits, fails = run_sweep([("all", asked(8)), ("little", asked(8, memory_gb=1.0))])
    assert fits.answer is not None
    assert (fails.answer, fails.tokens_per_s, fails.mfu, fails.dollars_per_trillion_tokens) == (
        None,
    ) * 4
    assert "only usual layouts were tried" in fails.problems[0].fix


def test_the_whole_space_is_no_slower_than_usual_layouts() -> None:
    for gpus in (8, 16):
        quick, exact = answer_question(asked(gpus)), answer_question(asked(gpus), exact=True)
        assert exact.best.step.step_s <= quick.best.step.step_s


def test_a_search_that_is_broken_off_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(question: PlanQuestion, **options: object) -> PlanAnswer:
        return replace(answered(), is_proved=False)

    monkeypatch.setattr(sweeps, "answer_question", broken)
    points = run_sweep((n, asked(n)) for n in (8, 16, 32))
    assert [point.value for point in points] == [8]


def test_sensitivity_varies_one_thing_and_keeps_tokens_per_step() -> None:
    found = analyze_sensitivity(answered(16))
    assert [rate.value for rate in found.batch] == [16, 32, 64, 128, 256]
    assert [rate.value for rate in found.length] == [1024, 2048, 4096, 8192, 16384]
    assert [rate.value for rate in found.gpus] == [8, 16, 32, 64]  # four are no whole node
    assert not found.exact
    base = {name: getattr(found, name)[at].tokens_per_s for name, at in (("batch", 2), ("gpus", 1))}
    assert base["batch"] == base["gpus"] == found.length[2].tokens_per_s


def test_larger_batches_train_no_slower_and_longer_sequences_no_faster() -> None:
    found = analyze_sensitivity(answered(16))
    batch = [rate.tokens_per_s or 0 for rate in found.batch]
    assert batch[0] < batch[-1]
    length = [rate.tokens_per_s or 0 for rate in found.length]
    assert length[0] > length[-1]


def test_more_failures_cost_more_money() -> None:
    failures = analyze_sensitivity(answered(16)).failures
    assert failures[0].value == 0
    assert failures[0].goodput == pytest.approx(1, abs=0.01)
    dollars = [rate.dollars_per_trillion_tokens or 0 for rate in failures]
    assert dollars == sorted(dollars)
    assert all(rate.spares is not None for rate in failures)


def test_with_a_fixed_number_of_spares_more_failures_mean_less_goodput() -> None:
    failures = analyze_sensitivity(answered(16), reliability=Reliability(spares=1)).failures
    goodput = [rate.goodput or 0 for rate in failures]
    assert goodput == sorted(goodput, reverse=True)


def test_a_failure_rate_without_end_says_so() -> None:
    hopeless = Reliability(failures_per_gpu_hour=1e3, spares=0)
    last = analyze_sensitivity(answered(16), reliability=hopeless).failures[-1]
    assert last.tokens_per_s is None
    assert last.problems
