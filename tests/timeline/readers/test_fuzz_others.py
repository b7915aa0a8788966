"""Mutated Nsight exports, execution traces and NCCL logs: no crash, no hang, bounded memory."""

import pytest

from tests.timeline.readers.fuzz_others import Result, fuzz


def _check(result: Result) -> None:
    assert result.answered
    assert result.damaged
    assert result.refused
    assert result.longest_s < 2


def test_a_few_hundred_mutated_files_end_in_an_answer_or_an_error() -> None:
    _check(fuzz(400, seed=1))


@pytest.mark.slow
def test_thousands_of_mutated_files_end_in_an_answer_or_an_error() -> None:
    _check(fuzz(20_000, seed=2))
