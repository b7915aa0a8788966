"""Of ranks that ended, the first cause is named, and not who waited for it."""

import os
import signal
import subprocess
from typing import cast

import pytest

from meshwright.run.parallel.launch.exit_reason import (
    EXIT_REASON_FD_VARIABLE,
    ExitReason,
    read_exit_reasons,
    send_exit_reason,
)
from meshwright.run.parallel.launch.exit_summary import JobExit, RankProcess, summarize_exit


class Ended:
    """A process that is over."""

    def __init__(self, code: int) -> None:
        self.returncode = code


def ranks(*codes: int, after_s: dict[int, float] | None = None) -> list[RankProcess]:
    """Return ranks that ended with these codes; minus a signal's number is one that killed."""
    times = after_s or {}
    return [
        RankProcess(
            number, cast("subprocess.Popen[bytes]", Ended(code)), 0.0, times.get(number, 1.0)
        )
        for number, code in enumerate(codes)
    ]


DIED = ExitReason(0, (2,), "rank 2 died, its process is gone")


def test_the_dead_come_before_those_that_waited_for_them() -> None:
    found = summarize_exit(ranks(4, 4, -9, after_s={0: 0.9}), [DIED], [])
    assert found == JobExit(4, "rank 2 was killed by SIGKILL after 1.0 s", DIED.message, 0)


def test_who_failed_comes_before_who_broke_for_it_in_the_same_moment() -> None:
    found = summarize_exit(ranks(70, 4, 3), [DIED], [])
    assert (found.exit_code, found.cause) == (3, "rank 2 ended with exit code 3 after 1.0 s")


def test_without_a_first_end_what_was_seen_is_said() -> None:
    words = [ExitReason(1, (0,), "rank 0 has not entered all_reduce")]
    assert summarize_exit(ranks(4, 4), words, []) == JobExit(4, words[0].message, reporter_rank=1)


@pytest.mark.parametrize("codes", [(130, 130), (130, 4), (-2, 130), (4, -2)])
def test_ranks_that_were_interrupted_end_as_one(codes: tuple[int, int]) -> None:
    found = summarize_exit(ranks(*codes), [DIED], [signal.SIGINT])
    assert (found.exit_code, found.cause) == (130, "")


@pytest.mark.parametrize("passed", [[], [signal.SIGTERM]])
def test_ranks_that_saved_on_request_end_with_the_code_of_the_first(passed: list[int]) -> None:
    found = summarize_exit(ranks(143, 0, 0), [], passed)
    assert (found.exit_code, found.cause, found.exit_messages) == (143, "", ())


def test_a_death_of_its_own_is_told_even_after_an_interrupt() -> None:
    assert summarize_exit(ranks(0, -9), [], [signal.SIGINT]).cause.startswith("rank 1 was killed")


def test_errors_of_ranks_are_said_once_with_who_had_them() -> None:
    three = ranks(0, 70, 70)
    for rank in three[1:]:
        rank.errors = ["error: no memory left"]
    assert summarize_exit(three, [], []).exit_messages == ("[ranks 1, 2] error: no memory left",)


def test_last_words_reach_who_listens_and_else_nobody() -> None:
    listening, telling = os.pipe()
    try:
        assert send_exit_reason(
            0, [2], f"{DIED.message}\n  more", {EXIT_REASON_FD_VARIABLE: str(telling)}
        )
        assert read_exit_reasons(os.read(listening, 4096) + b"[broken") == [DIED]
    finally:
        os.close(listening)
        os.close(telling)
    assert not send_exit_reason(0, [2], "", {})
