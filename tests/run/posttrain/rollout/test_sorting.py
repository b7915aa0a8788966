"""The task asks what it says, judges what it asked, and never shows what it holds out."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.posttrain.rollout import RolloutTurn, SortingDigits
from meshwright.run.posttrain.rollout.sorting_task import sorting_verifiers
from meshwright.run.posttrain.rollout.sorting_task.sorting_digits import is_held_out


def test_prompts_and_answers_read_as_text() -> None:
    task = SortingDigits(digits=4)
    assert task.words.text(task.build_prompt((7, 3, 9, 1))) == "^7391>"
    assert task.words.text(task.build_answer((7, 3, 9, 1))) == "1379$"
    assert task.words.tokens("^7391>") == task.build_prompt((7, 3, 9, 1))
    with pytest.raises(InputError, match="'x' is no word"):
        task.words.tokens("x")


def test_a_number_always_asks_the_same_and_numbers_ask_differently() -> None:
    task, again = SortingDigits(), SortingDigits()
    asked = [task.reset(number).prompt for number in range(200)]
    assert asked == [again.reset(number).prompt for number in range(200)]
    assert len(set(asked)) > 180
    assert asked != [SortingDigits(seed=1).reset(number).prompt for number in range(200)]


def test_what_is_held_out_is_a_tenth_and_never_shown() -> None:
    train, held = SortingDigits(digits=3), SortingDigits(digits=3, part="held-out")
    shown = {train.sample_digits(number) for number in range(2000)}
    kept = {held.sample_digits(number) for number in range(300)}
    assert not shown & kept
    lists = [(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    assert 70 < sum(map(is_held_out, lists)) < 130
    assert any(list(one) == sorted(one) for one in kept), "none is left out for being easy"


@pytest.mark.parametrize(
    ("answer", "exact", "share"),
    [
        ([1, 3, 7, 11], 1.0, 1.0),
        ([1, 3, 7], 0.0, 0.75),
        ([3, 1, 7, 11], 0.0, 0.5),
        ([1, 3, 7, 7, 11], 0.0, 0.6),
        ([], 0.0, 0.0),
    ],
)
def test_only_the_sorted_digits_with_their_end_are_right(
    answer: list[int], exact: float, share: float
) -> None:
    job: dict[str, Any] = {"digits": [7, 3, 1], "answer": answer, "end": 11}
    assert sorting_verifiers.verify_sorted(job)[0] == exact
    assert sorting_verifiers.sorted_fraction(job)[0] == share


def test_an_episode_ends_after_one_answer_with_a_check() -> None:
    task = SortingDigits(digits=2, reward="share")
    turn = RolloutTurn(tokens=(1, 2), logprobs=(-1.0, -1.0), finish="length", version=0, seed=0)
    reply = task.reset(0).step(turn)
    assert reply.done
    (check,) = reply.verifier_jobs
    assert check.verifier in task.verifiers
    assert check.payload["answer"] == [1, 2]
