"""How often patterns are right: trials with something known in them, and what is counted of them.

A pattern that is told and not there is a *false alarm*, unless it is allowed in that trial: what
the base shows by itself at half of the least share that is told or more, what the planted fault is
by its nature as well, what is told as a consequence of a pattern that is there
(`Finding.explained_by`), and what a label leaves open. A pattern that is there and not told is
*missed*.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.observe.finding import Finding
from meshwright.observe.findings import list_patterns


class Trial(NamedTuple):
    """A run with something known in it."""

    where: str
    """The trace, or what the fault was planted in."""
    truth: frozenset[str]
    """Patterns that are there."""
    allowed: frozenset[str]
    """Patterns that may be told besides."""
    found: frozenset[str]
    cost: tuple[float, float] | None = None
    """Planted and told, as parts of the time."""

    @property
    def missed(self) -> frozenset[str]:
        """There and not told."""
        return self.truth - self.found

    @property
    def false(self) -> frozenset[str]:
        """Told and neither there nor allowed."""
        return self.found - self.truth - self.allowed


class Score(NamedTuple):
    """How often patterns were right."""

    true: int
    false: int
    missed: int

    @property
    def there(self) -> int:
        """How often there was one."""
        return self.true + self.missed

    @property
    def precision(self) -> float | None:
        """Of those told, how many are there."""
        told = self.true + self.false
        return self.true / told if told else None

    @property
    def recall(self) -> float | None:
        """Of those there, how many were told."""
        return self.true / self.there if self.there else None


def score(trials: Iterable[Trial], *names: str) -> Score:
    """Count some patterns over trials; all where none is named."""
    wanted = frozenset(names or (pattern.name for pattern in list_patterns()))
    true = false = missed = 0
    for trial in trials:
        true += len(trial.truth & trial.found & wanted)
        false += len(trial.false & wanted)
        missed += len(trial.missed & wanted)
    return Score(true, false, missed)


def trial(
    where: str,
    truth: Iterable[str],
    allowed: Iterable[str],
    found: Sequence[Finding],
    cost: tuple[float, float] | None = None,
) -> Trial:
    """A trial by what was told; consequences of what is there are allowed."""
    there = frozenset(truth)
    follows = frozenset(one.name for one in found if one.explained_by in there)
    return Trial(where, there, frozenset(allowed) | follows, names_of(found), cost)


def names_of(found: Iterable[Finding]) -> frozenset[str]:
    """The patterns that were told."""
    return frozenset(one.name for one in found)
