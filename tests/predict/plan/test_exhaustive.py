"""On small questions the planner's answer is that of trying every layout."""

from random import Random

import pytest

from meshwright.errors import InputError
from meshwright.predict.plan import Question, find_plans
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of

FAMILIES = 3
ONCE_WRONG: tuple[int, ...] = ()


def planned(question: Question) -> list[float]:
    """Return the steps of the plans found, none where nothing fits."""
    try:
        answer = find_plans(question, most=FAMILIES, execute=False)
    except InputError:
        return []
    assert answer.proved
    return [plan.step.step_s for plan in answer.plans]


def assert_exact(seed: int, most: int) -> None:
    question = question_of(Random(seed), most)
    wanted = [one.step.step_s for one in Every(question).fastest(FAMILIES)]
    assert planned(question) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_the_fastest_of_each_family_are_those_of_all_layouts(seed: int) -> None:
    assert_exact(seed, most=1000)


@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_what_was_once_missed_is_found(seed: int) -> None:
    assert_exact(seed, most=1000)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_500, 10))
def test_the_same_for_many_questions(first: int) -> None:
    for seed in range(first, first + 10):
        assert_exact(seed, most=1000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20_000, 20_020))
def test_the_same_with_many_layouts(seed: int) -> None:
    assert_exact(seed, most=20_000)
