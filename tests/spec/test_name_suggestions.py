"""Names that people mistype."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.name_suggestions import (
    build_unknown_name_problem,
    find_closest_names,
    format_suggestion,
)

MODELS = ["llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "mixtral-8x7b", "gpt-oss-20b"]


def test_nearest_is_the_smallest_slip_first() -> None:
    assert find_closest_names("llama3.1-7b", MODELS)[0] in {"llama3.1-8b", "llama3.1-70b"}
    assert find_closest_names("mixtrl-8x7b", MODELS) == ["mixtral-8x7b"]


def test_nearest_ignores_case() -> None:
    assert find_closest_names("GPT-OSS-20B", MODELS)[0] == "gpt-oss-20b"


def test_nearest_keeps_the_known_spelling() -> None:
    assert find_closest_names("h100", ["H100", "A100"])[0] == "H100"


def test_a_word_inside_a_long_name_finds_it() -> None:
    assert find_closest_names("oss", MODELS) == ["gpt-oss-20b"]


def test_nothing_is_suggested_for_what_is_far_from_all() -> None:
    assert find_closest_names("zzzzzz", MODELS) == []


def test_only_the_beginning_of_a_word_inside_a_name_finds_it() -> None:
    assert find_closest_names("end", ["backend"]) == []
    assert find_closest_names("back", ["use-backend", "use_backend"])


def test_unknown_name_says_the_kind_the_name_and_the_nearest() -> None:
    problem = build_unknown_name_problem("model", "mixtrl-8x7b", MODELS, "model")
    assert problem.where == "model"
    assert problem.what == "there is no model named 'mixtrl-8x7b'"
    assert problem.fix == "did you mean mixtral-8x7b?"


def test_unknown_name_lists_a_short_catalog_and_counts_a_long_one() -> None:
    assert build_unknown_name_problem("thing", "zzz", ["b", "a"]).fix == "use one of a, b"
    many = [f"name{index:03}" for index in range(100)]
    assert build_unknown_name_problem("thing", "zzz", many).fix.startswith(
        "there are 100, such as name000"
    )


def test_suggestion_for_what_is_no_text_is_the_list_in_its_order() -> None:
    assert format_suggestion(3, ["pre", "post"]) == "use one of pre, post"
    assert format_suggestion("prre", ["post", "pre"]) == "did you mean pre?"
    assert format_suggestion("x", []) == "leave it out: there is none to choose"


@given(st.text(max_size=30), st.lists(st.text(max_size=10), max_size=20))
def test_any_name_gets_an_answer(name: str, known: list[str]) -> None:
    close = find_closest_names(name, known)
    assert len(close) <= 3
    assert set(close) <= set(known)
    assert build_unknown_name_problem("thing", name, known).fix


@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=10), max_size=20))
def test_exact_name_comes_first(name: str, others: list[str]) -> None:
    best = find_closest_names(name, [*others, name])[0]
    assert best.lower() == name.lower() or name.lower() in best.lower()
