"""`summarize_exit`: the rank that caused a failure, not the ranks that waited for it."""

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.run.parallel.launch.config_consensus import name_ranks
from meshwright.run.parallel.launch.exit_reason import WATCHDOG_EXIT_CODE, ExitReason

INTERRUPTED_MESSAGE = "interrupted"
_SIGNALLED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit codes of programs that saved and ended because a signal asked them to."""
_SPOKEN = {1, 2, 3, 70, *_SIGNALLED}
"""Exit codes of programs that have said why they end."""


@dataclass
class RankProcess:
    """One process, and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    start_s: float
    runtime_s: float | None = None
    was_killed: bool = False
    """Whether it ended because others had failed."""
    errors: list[str] = field(default_factory=list)
    """What it said went wrong, in the words of our own messages."""

    @property
    def exit_code(self) -> int:
        """Its exit code as a shell counts, with 128 added to a signal's number."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    @property
    def exit_description(self) -> str:
        """How it ended, in words."""
        code, after = self.process.returncode, f"after {self.runtime_s or 0:.1f} s"
        if code >= 0:
            return f"ended with exit code {code} {after}"
        return f"was killed by {signal.Signals(-code).name} {after}"


class JobExit(NamedTuple):
    """How all ranks ended."""

    exit_code: int
    """Exit code of the job: that of the first cause, 4 where a signal killed a rank."""
    cause: str = ""
    """Whose fault it is and how that rank ended; empty where all is said."""
    peer_report: str = ""
    """What the others saw of it, by the first that told."""
    reporter_rank: int | None = None
    """Who told."""
    exit_messages: tuple[str, ...] = ()
    """Lines that ranks have left to say."""


def summarize_exit(
    ranks: Sequence[RankProcess], words: Sequence[ExitReason], passed: Sequence[int]
) -> JobExit:
    """Return how a job ended; `passed` are the signals that its starter passed on."""
    codes = {rank.exit_code for rank in ranks}
    if codes == {0}:
        return JobExit(0)
    own = [rank for rank in ranks if rank.exit_code and not rank.was_killed]
    asked = {128 + number for number in passed}
    if asked and {rank.exit_code for rank in own} <= asked | {
        WATCHDOG_EXIT_CODE
    }:  # all as they were asked to
        quiet = ranks[0].exit_code in _SIGNALLED  # it has said so itself
        return JobExit(min(asked), exit_messages=() if quiet else (INTERRUPTED_MESSAGE,))
    if len(codes - {0}) == 1 and codes - {0} < _SIGNALLED and ranks[0].exit_code:
        return JobExit(ranks[0].exit_code)  # a signal of its own, which rank 0 has told of
    if len(codes) == 1 and codes < _SPOKEN:  # all of one mind, and rank 0 has said why
        return JobExit(codes.pop())
    said = _left_to_say(ranks)
    blamed = set(words[0].culprit_ranks) if words else set()

    def order(rank: RankProcess) -> tuple[bool, bool, float]:
        """Put those that ended because of others last."""
        return rank.exit_code == WATCHDOG_EXIT_CODE, rank.rank not in blamed, rank.runtime_s or 0.0

    first = min(own, key=order)
    if (
        first.exit_code == WATCHDOG_EXIT_CODE and words
    ):  # nobody ended first: one hung, or they parted
        return JobExit(
            WATCHDOG_EXIT_CODE, words[0].message, reporter_rank=words[0].rank, exit_messages=said
        )
    others = [rank.rank for rank in ranks if rank.was_killed and rank.exit_code]
    code = first.exit_code if first.process.returncode > 0 else WATCHDOG_EXIT_CODE
    what = f"rank {first.rank} {first.exit_description}{_ended(others)}"
    about = next((each for each in words if first.rank in each.culprit_ranks), None)
    if about is None:
        return JobExit(code, what, exit_messages=said)
    return JobExit(code, what, about.message, about.rank, said)


def _left_to_say(ranks: Sequence[RankProcess]) -> tuple[str, ...]:
    """Return the errors of ranks, each with those that had it."""
    said: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.errors:
            said.setdefault("\n".join(rank.errors), []).append(rank.rank)
    return tuple(
        f"[{name_ranks(numbers)}] {line}"
        for text, numbers in said.items()
        for line in text.splitlines()
    )


def _ended(others: list[int]) -> str:
    if not others:
        return ""
    return f"; {name_ranks(others)} {'was' if len(others) == 1 else 'were'} ended for it"
