"""Problems name the flags that a user wrote, not the fields that a check knows."""

import argparse

from meshwright.cli.flags.problems import declare_flag_names, rename_fields_to_flags
from meshwright.errors import InputError, Problem


def said(words: list[str], *problems: Problem, alone: bool = False) -> list[str]:
    """Return what is said of problems to who wrote these words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--max-num-batched-tokens")
    parser.add_argument("--max-lora-rank")
    parser.add_argument("--block-size")
    parser.add_argument("--kv-cache-dtype", default="auto")
    if alone:
        declare_flag_names(parser, cache_precision="--kv-cache-dtype")
        declare_flag_names(parser, **{"draft.kv_cache_dtype": "--draft-kv-cache-dtype"})
    error = InputError(problems)
    rename_fields_to_flags(error, parser, parser.parse_args(words))
    assert str(error) == "\n".join(map(str, error.problems))
    return str(error).splitlines()


def test_a_flag_that_was_given_is_named() -> None:
    assert said(
        ["--max-num-batched-tokens", "1"], Problem("max_num_batched_tokens", "too few", "use 4")
    ) == ["--max-num-batched-tokens: too few (fix: use 4)"]


def test_what_may_stand_in_a_file_keeps_its_name() -> None:
    problems = [
        Problem("max_num_batched_tokens", "too few"),
        Problem("model", "unknown", "use model=b"),
    ]
    assert said(["a"], *problems) == [
        "max_num_batched_tokens: too few",
        "model: unknown (fix: use model=b)",
    ]


def test_where_there_are_only_flags_all_are_named() -> None:
    problems = [
        Problem("max_num_batched_tokens", "too few"),
        Problem("cache_precision", "is none"),
        Problem("folder", "rank 32", "use max_lora_rank=32"),
    ]
    assert said([], *problems, alone=True) == [
        "--max-num-batched-tokens: too few",
        "--kv-cache-dtype: is none",
        "folder: rank 32 (fix: use --max-lora-rank 32)",
    ]


def test_a_name_without_a_value_stands_in_backticks() -> None:
    problem = Problem(
        "memory",
        "too little",
        "leave out `max_num_batched_tokens` or `model`; block_size is so",
    )
    assert said([], problem, alone=True) == [
        "memory: too little (fix: leave out --max-num-batched-tokens or `model`; block_size is so)"
    ]


def test_a_fix_names_fields_of_the_part_that_a_problem_is_in() -> None:
    problems = [
        Problem("draft.kv_cache_dtype", "is none", "use kv_cache_dtype=fp8"),
        Problem(
            "draft.rank", "is none", "use max_lora_rank=8, or leave out `draft.kv_cache_dtype`"
        ),
    ]
    assert said([], *problems, alone=True) == [
        "--draft-kv-cache-dtype: is none (fix: use --draft-kv-cache-dtype fp8)",
        "draft.rank: is none (fix: use --max-lora-rank 8, or leave out --draft-kv-cache-dtype)",
    ]
