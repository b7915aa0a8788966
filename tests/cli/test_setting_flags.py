"""Problems name the flags that a user wrote, not the fields that a check knows."""

import argparse

from meshwright.cli.setting_flags import only_flags_set, say_as_flags
from meshwright.errors import InputError, Problem


def said(words: list[str], *problems: Problem, alone: bool = False) -> list[str]:
    """Return what is said of problems to who wrote these words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--batch-tokens")
    parser.add_argument("--adapter-rank")
    parser.add_argument("--kv", default="model")
    if alone:
        only_flags_set(parser, kv_precision="--kv")
        only_flags_set(parser, **{"draft.kv": "--draft-kv"})
    error = InputError(problems)
    say_as_flags(error, parser, parser.parse_args(words))
    assert str(error) == "\n".join(map(str, error.problems))
    return str(error).splitlines()


def test_a_flag_that_was_given_is_named() -> None:
    assert said(["--batch-tokens", "1"], Problem("batch_tokens", "too few", "use 4")) == [
        "--batch-tokens: too few (fix: use 4)"
    ]


def test_what_may_stand_in_a_file_keeps_its_name() -> None:
    problems = [Problem("batch_tokens", "too few"), Problem("model", "unknown", "use model=b")]
    assert said(["a"], *problems) == ["batch_tokens: too few", "model: unknown (fix: use model=b)"]


def test_where_there_are_only_flags_all_are_named() -> None:
    problems = [
        Problem("batch_tokens", "too few"),
        Problem("kv_precision", "is none"),
        Problem("folder", "rank 32", "use adapter_rank=32"),
    ]
    assert said([], *problems, alone=True) == [
        "--batch-tokens: too few",
        "--kv: is none",
        "folder: rank 32 (fix: use --adapter-rank 32)",
    ]


def test_a_name_without_a_value_stands_in_backticks() -> None:
    problem = Problem("memory", "too little", "leave out `batch_tokens` or the `model`; kv is so")
    assert said([], problem, alone=True) == [
        "memory: too little (fix: leave out --batch-tokens or the `model`; kv is so)"
    ]


def test_a_fix_names_fields_of_the_part_that_a_problem_is_in() -> None:
    problems = [
        Problem("draft.kv", "is none", "use kv=fp8"),
        Problem("draft.rank", "is none", "use adapter_rank=8, or leave out `draft.kv`"),
    ]
    assert said([], *problems, alone=True) == [
        "--draft-kv: is none (fix: use --draft-kv fp8)",
        "draft.rank: is none (fix: use --adapter-rank 8, or leave out --draft-kv)",
    ]
