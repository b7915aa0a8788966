r"""Answers come to a number or a choice, marked by `####` or `\boxed{}`, or named last."""

from fractions import Fraction

import pytest

from meshwright.run.posttrain.evaluation.exact_match import matches_answer
from meshwright.run.posttrain.evaluation.final_answer import (
    extract_final_choice,
    extract_final_number,
    extract_marked_answer,
)
from meshwright.run.posttrain.evaluation.verifiers.text_verifiers import (
    verify_choice,
    verify_exact,
    verify_format,
    verify_number,
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Tom has 3 + 4 = 7 apples.\n#### 7", 7),
        ("#### 42 of 50 pears", 42),
        ("####\n42", 42),
        ("She pays $1,250.50 in all.", Fraction("1250.5")),
        (r"thus \boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"thus \boxed{x = {5}} and not 9", 5),
        (r"first \boxed{1}, then #### 2", 2),
        (r"#### 1, or rather \boxed{2}", 2),
        ("a debt of -3", -3),
        ("a debt of −3", -3),
        ("from 3-4 days", 4),
        ("one of 10/4", Fraction(5, 2)),
        ("it is 42.0.", 42),
        ("about 2.5e3", 2500),
        ("half of it: .5", Fraction(1, 2)),
        ("<think>5 or 6?</think> six", None),
        ("<think>5</think> The answer is 6.", 6),
        ("nothing of 3/0", None),
        (r"\boxed{none} of 7", None),
        ("9" * 500, None),
        ("", None),
    ],
)  # fmt: skip
def test_an_answer_comes_to_a_number(text: str, wanted: object) -> None:
    assert extract_final_number(text) == wanted


def test_only_marked_numbers_count_where_that_is_asked() -> None:
    assert extract_final_number("it is 7", only_marked=True) is None
    assert extract_final_number("it is 7\n#### 7", only_marked=True) == 7
    assert extract_marked_answer(r"a box \boxed{that is not closed") is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The answer is (B).", 1),
        ("Answer: C", 2),
        (r"so \boxed{A}", 0),
        ("I am not sure.\n**D**", 3),
        ("b) a cat", 1),
        ("A big animal", None),
        ("Cat!", 1),
        ("the sun", 3),
        ("E", None),
        ("<think>The answer is A</think>\nB", 1),
        ("", None),
    ],
)
def test_an_answer_comes_to_a_choice(text: str, wanted: int | None) -> None:
    assert extract_final_choice(text, ["dog", "cat", "no animal", "The sun"]) == wanted


def test_the_evaluation_compares_numbers_where_it_is_asked_to() -> None:
    assert matches_answer("so it costs 1,000 dollars", ["#### 1000"], normalization="number")
    assert not matches_answer("so it costs 1,001 dollars", ["#### 1000"], normalization="number")
    assert not matches_answer("no idea", ["none"], normalization="number"), (
        "no number is not equal to none"
    )


def test_thoughts_are_no_part_of_an_exact_answer() -> None:
    assert matches_answer("<think>four?</think> 4", ["4"], normalization="strip")
    assert matches_answer(
        "<think>4</think> no", ["4"], pattern=r"<think>(\d)", normalization="strip"
    )


def test_verifiers_say_what_is_right_and_why() -> None:
    job = {"text": " 4 ", "answers": ["5", "4"], "pattern": "", "normalization": "strip"}
    assert verify_exact(job) == (1.0, "right")
    assert verify_exact(job | {"text": "6"}) == (0.0, "wanted '5'")
    counted = {"text": "it is 4", "answers": ["#### 4"], "require_marker": False}
    assert verify_number(counted) == (1.0, "comes to 4")
    assert verify_number(counted | {"require_marker": True}) == (0.0, "comes to no number")
    assert verify_number(counted | {"text": "5"}) == (0.0, "comes to 5, wanted 4")
    assert verify_choice({"text": "(b)", "choices": ["x", "y"], "right": 1})[0] == 1.0
    assert verify_choice({"text": "(a)", "choices": ["x", "y"], "right": 1})[0] == 0.0
    shape = {"pattern": "<think>.*</think>.+"}
    assert verify_format(shape | {"text": "<think>a\nb</think>\nso 4\n"})[0] == 1.0
    assert verify_format(shape | {"text": "so <think>a</think> 4"})[0] == 0.0
