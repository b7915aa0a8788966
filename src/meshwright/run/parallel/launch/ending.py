"""`closing`: of ranks that ended, whose fault it was: the first cause, not who waited for it."""

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.run.parallel.launch.agreement import ranked
from meshwright.run.parallel.launch.last_words import LastWords

CANNOT_GO_ON = 4
"""Exit code of ranks that end because of another, and of a job that lost one."""
INTERRUPTED = "interrupted"
_SPOKEN = {1, 2, 3, 70, 130}
"""Exit codes of programs that have said why they end."""


@dataclass
class Rank:
    """One process, and how it ended."""

    number: int
    process: subprocess.Popen[bytes]
    began: float
    ended_s: float | None = None
    was_ended: bool = False
    """Whether it ended because others had failed."""
    errors: list[str] = field(default_factory=list)
    """What it said went wrong, in the words of our own messages."""

    @property
    def code(self) -> int:
        """Its exit code as a shell counts, with 128 added to a signal's number."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    @property
    def fate(self) -> str:
        """How it ended, in words."""
        code, after = self.process.returncode, f"after {self.ended_s or 0:.1f} s"
        if code >= 0:
            return f"ended with exit code {code} {after}"
        return f"was killed by {signal.Signals(-code).name} {after}"


class Ending(NamedTuple):
    """How all ranks ended."""

    code: int
    """Exit code of the job: that of the first cause, 4 where a signal killed a rank."""
    what: str = ""
    """Whose fault it is and how that rank ended; empty where all is said."""
    seen: str = ""
    """What the others saw of it, by the first that told."""
    teller: int | None = None
    """Who told."""
    said: tuple[str, ...] = ()
    """Lines that ranks have left to say."""


def closing(ranks: Sequence[Rank], words: Sequence[LastWords], passed: Sequence[int]) -> Ending:
    """Return how a job ended; `passed` are the signals that its starter passed on."""
    codes = {rank.code for rank in ranks}
    if codes == {0}:
        return Ending(0)
    own = [rank for rank in ranks if rank.code and not rank.was_ended]
    asked = {128 + number for number in passed}
    if asked and {rank.code for rank in own} <= asked | {CANNOT_GO_ON}:  # all as they were asked to
        quiet = ranks[0].code == 128 + signal.SIGINT  # it has said so itself
        return Ending(min(asked), said=() if quiet else (INTERRUPTED,))
    if len(codes) == 1 and codes < _SPOKEN:  # all of one mind, and rank 0 has said why
        return Ending(codes.pop())
    said = _left_to_say(ranks)
    blamed = set(words[0].culprits) if words else set()

    def order(rank: Rank) -> tuple[bool, bool, float]:
        """Put those that ended because of others last."""
        return rank.code == CANNOT_GO_ON, rank.number not in blamed, rank.ended_s or 0.0

    first = min(own, key=order)
    if first.code == CANNOT_GO_ON and words:  # nobody ended first: one hung, or they parted
        return Ending(CANNOT_GO_ON, words[0].text, teller=words[0].rank, said=said)
    others = [rank.number for rank in ranks if rank.was_ended and rank.code]
    code = first.code if first.process.returncode > 0 else CANNOT_GO_ON
    what = f"rank {first.number} {first.fate}{_ended(others)}"
    about = next((each for each in words if first.number in each.culprits), None)
    if about is None:
        return Ending(code, what, said=said)
    return Ending(code, what, about.text, about.rank, said)


def _left_to_say(ranks: Sequence[Rank]) -> tuple[str, ...]:
    """Return the errors of ranks, each with those that had it."""
    said: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.errors:
            said.setdefault("\n".join(rank.errors), []).append(rank.number)
    return tuple(
        f"[{ranked(numbers)}] {line}"
        for text, numbers in said.items()
        for line in text.splitlines()
    )


def _ended(others: list[int]) -> str:
    if not others:
        return ""
    return f"; {ranked(others)} {'was' if len(others) == 1 else 'were'} ended for it"
