"""Of ranks that ended, the first cause is named, and not who waited for it."""

import os
import signal
import subprocess
from typing import cast

import pytest

from meshwright.run.parallel.launch.ending import Ending, Rank, closing
from meshwright.run.parallel.launch.last_words import PIPE, LastWords, heard, told


class Ended:
    """A process that is over."""

    def __init__(self, code: int) -> None:
        self.returncode = code


def ranks(*codes: int, after_s: dict[int, float] | None = None) -> list[Rank]:
    """Return ranks that ended with these codes; minus a signal's number is one that killed."""
    times = after_s or {}
    return [
        Rank(number, cast("subprocess.Popen[bytes]", Ended(code)), 0.0, times.get(number, 1.0))
        for number, code in enumerate(codes)
    ]


DIED = LastWords(0, (2,), "rank 2 died, its process is gone")


def test_the_dead_come_before_those_that_waited_for_them() -> None:
    found = closing(ranks(4, 4, -9, after_s={0: 0.9}), [DIED], [])
    assert found == Ending(4, "rank 2 was killed by SIGKILL after 1.0 s", DIED.text, 0)


def test_who_failed_comes_before_who_broke_for_it_in_the_same_moment() -> None:
    found = closing(ranks(70, 4, 3), [DIED], [])
    assert (found.code, found.what) == (3, "rank 2 ended with exit code 3 after 1.0 s")


def test_without_a_first_end_what_was_seen_is_said() -> None:
    words = [LastWords(1, (0,), "rank 0 did not come to all_reduce")]
    assert closing(ranks(4, 4), words, []) == Ending(4, words[0].text, teller=1)


@pytest.mark.parametrize("codes", [(130, 130), (130, 4), (-2, 130), (4, -2)])
def test_ranks_that_were_interrupted_end_as_one(codes: tuple[int, int]) -> None:
    found = closing(ranks(*codes), [DIED], [signal.SIGINT])
    assert (found.code, found.what) == (130, "")


def test_a_death_of_its_own_is_told_even_after_an_interrupt() -> None:
    assert closing(ranks(0, -9), [], [signal.SIGINT]).what.startswith("rank 1 was killed")


def test_errors_of_ranks_are_said_once_with_who_had_them() -> None:
    three = ranks(0, 70, 70)
    for rank in three[1:]:
        rank.errors = ["error: no memory left"]
    assert closing(three, [], []).said == ("[ranks 1-2] error: no memory left",)


def test_last_words_reach_who_listens_and_else_nobody() -> None:
    listening, telling = os.pipe()
    try:
        assert told(0, [2], f"{DIED.text}\n  more", {PIPE: str(telling)})
        assert heard(os.read(listening, 4096) + b"[broken") == [DIED]
    finally:
        os.close(listening)
        os.close(telling)
    assert not told(0, [2], "", {})
