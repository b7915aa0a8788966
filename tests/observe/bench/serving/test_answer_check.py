"""Answers that are lost, mixed up or changed are named."""

from meshwright.observe.bench.serving.answer_check import compare_answers, compare_run_answers
from tests.observe.bench.serving.served_requests import run_of, served


def test_equal_answers_are_the_same() -> None:
    found = [served(index, 0.0, [1]) for index in range(3)]
    assert compare_answers(found, found) == (3, (), ())


def test_an_answer_that_belongs_to_another_request_is_called_so() -> None:
    alone = [served(index, 0.0, [1]) for index in range(2)]
    mixed = [served(0, 0.0, [1], answer_hash="answer 1"), alone[1]]
    (line,) = compare_answers(mixed, alone).different
    assert line == "request 0: has the answer of request 1"


def test_the_first_other_token_is_named() -> None:
    alone = [served(0, 0.0, [1], output=(1, 2, 3))]
    changed = [served(0, 0.0, [1], output=(1, 9, 3), answer_hash="x")]
    assert compare_answers(changed, alone).different == ("request 0: token 1 is 9, not 2",)
    cut = [served(0, 0.0, [1], output=(1, 2), answer_hash="x")]
    assert compare_answers(cut, alone).different == ("request 0: ends after 2 tokens, not 3",)


def test_requests_without_an_answer_are_not_passed_over() -> None:
    alone = [served(0, 0.0, [1]), served(1, 0.0, [1])]
    (line,) = compare_answers(alone[:1], alone).unanswered
    assert line == "request 1: not asked under load, answered beside it"
    failed = [alone[0], served(1, 0.0, [], error="cut off", error_detail="why")]
    (line,) = compare_answers(failed, alone).unanswered
    assert line == "request 1: cut off (why) under load, answered beside it"


def test_results_with_more_runs_are_not_all_compared() -> None:
    runs = [run_of([served(0, 0.0, [1])]), run_of([served(0, 0.0, [1])], "another")]
    assert compare_run_answers(runs, runs[:1]) == (1, (), ("another: only in one result",))
