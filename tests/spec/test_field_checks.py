"""The tests that spec values share: each refusal says the value, what is allowed, and a fix."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import (
    MAX_COUNT,
    FieldChecker,
    check_choice,
    check_integer,
    check_number,
    get_root_field,
    raise_problems,
)
from meshwright.spec.serialization import UNREADABLE

anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from([10**400, -(10**400), 10**5000, math.inf, math.nan, UNREADABLE])
)


@given(anything)
def test_every_refusal_of_a_number_has_a_fix(value: object) -> None:
    bounds = FieldChecker()
    bounds.problems += (
        check_integer("a", value)
        + check_integer("b", value, 3, 7)
        + check_number("c", value, -1.0, 2.5)
    )
    bounds.positive(d=value)
    bounds.not_negative(e=value)
    bounds.count(f=value)
    bounds.not_empty(g=value)
    bounds.one_of("h", value, ("none", "pack"))
    assert all(p.where and p.what and p.fix for p in bounds.problems)


@pytest.mark.parametrize(
    ("value", "what", "fix"),
    [
        (0, "0 is not a whole number of at least 1", "use 1"),
        (2.6, "2.6 is not a whole number of at least 1", "use 3"),
        (True, "True is not a whole number of at least 1", "use 1 or more"),
        (
            MAX_COUNT + 1,
            f"{MAX_COUNT + 1} is not a whole number up to {MAX_COUNT:,}",
            f"use {MAX_COUNT}",
        ),
    ],
)
def test_count_that_cannot_be_gets_the_nearest_one(value: object, what: str, fix: str) -> None:
    assert check_integer("n", value) == [Problem("n", what, fix)]


def test_count_between_limits_names_both() -> None:
    (problem,) = check_integer("n", 9, 3, 7)
    assert problem.fix == "use 7"
    (problem,) = check_integer("n", "x", 3, 7)
    assert "from 3 to 7" in problem.what


@pytest.mark.parametrize(
    ("value", "fix"), [(-3, "use 0 or more"), (9, "use 1"), ("x", "use 0 or more")]
)
def test_number_out_of_range_gets_the_nearest_end(value: object, fix: str) -> None:
    assert [problem.fix for problem in check_number("share", value, 0, 1)] == [fix]


def test_slip_of_the_sign_is_turned_round() -> None:
    bounds = FieldChecker()
    bounds.positive(rate=-2.5, other=0)
    assert [problem.fix for problem in bounds.problems] == ["use 2.5", "give a number such as 1.5"]


def test_figure_that_is_not_known_is_no_fault() -> None:
    bounds = FieldChecker()
    bounds.positive(a=None)
    bounds.not_negative(b=None)
    bounds.count(c=None)
    assert bounds.problems == []


def test_word_gets_the_nearest_or_the_list() -> None:
    assert check_choice("packing", "pak", ("none", "pack"))[0].fix == "did you mean pack?"
    assert check_choice("packing", 7, ("none", "pack"))[0].fix == "use one of none, pack"
    assert check_choice("packing", "pack", ("none", "pack")) == []


def test_rule_between_fields_can_ask_whether_they_are_sound() -> None:
    bounds = FieldChecker()
    bounds.count(heads=0, width=4)
    bounds.add("tiers[0].nodes", "is odd", "use 2")
    assert bounds.is_valid("width", "kv_heads")
    assert not bounds.is_valid("width", "heads")
    assert not bounds.is_valid("tiers")


def test_field_that_was_not_read_is_not_sound() -> None:
    bounds = FieldChecker()
    bounds.mark_unreadable(blocks=UNREADABLE, name="x", none=None)
    assert not bounds.is_valid("blocks")
    assert bounds.is_valid("name", "none")


@pytest.mark.parametrize(("where", "field"), [("a", "a"), ("a.b", "a"), ("a[0].b", "a"), ("", "")])
def test_path_begins_with_its_field(where: str, field: str) -> None:
    assert get_root_field(where) == field


def test_every_problem_is_raised_at_once() -> None:
    with pytest.raises(InputError) as caught:
        raise_problems(check_integer("a", 0), [], check_integer("b", 0))
    assert [problem.where for problem in caught.value.problems] == ["a", "b"]
    raise_problems([], [])
