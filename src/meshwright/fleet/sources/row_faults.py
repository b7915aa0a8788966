"""`RowFaults`: rows of a foreign list that cannot be right, with their lines and columns.

Rows with a fault are left out, counted and reported. A file with more than a few of them is
refused: then a unit, a column or a zone is wrong, and what is left would not be the cluster's.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.fleet.columns import Flags, Ints
from meshwright.spec.units import format_quantity

MAX_FAULTY_FRACTION: Final = 0.1
"""A file with a larger share of faulty rows is refused."""
_MOST_WORTH_READING: Final = 0.95
_EXAMPLES: Final = 5
_SHOWN_LETTERS: Final = 40

FindLines = Callable[[Sequence[int]], dict[int, int]]
"""Returns the line of the file on which each of some rows stands."""


class _FaultKind:
    """Rows with the same fault in the same column."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.examples: list[tuple[int, str]] = []


class ZoneUse(NamedTuple):
    """The zone that times without one were read in."""

    zone: str
    why: str
    """Why this zone: empty where the user gave it."""


class RowFaults:
    """Faulty rows of one file."""

    def __init__(self, label: str, max_fraction: float = MAX_FAULTY_FRACTION) -> None:
        self.label = label
        self.max_fraction = max_fraction
        self.num_rows = 0
        """Rows that were read."""
        self.num_faulty = 0
        """Rows with at least one fault."""
        self.num_wrong_width = 0
        """Rows with too many or too few fields, which are not among these."""
        self.zone_uses: list[ZoneUse] = []
        self._kinds: dict[tuple[str, str, str], _FaultKind] = {}

    def add(
        self, rows: Ints, column: str, values: Sequence[object], what: str, fix: str = ""
    ) -> None:
        """Count the fault `what` of some rows (by their number in the file) and their values."""
        kind = self._kinds.setdefault((column, what, fix), _FaultKind())
        kind.num_rows += len(rows)
        room = _EXAMPLES - len(kind.examples)
        pairs = zip(rows[:room].tolist(), values[:room], strict=True)
        kind.examples += [(row, _shown(value)) for row, value in pairs]

    def count_block(self, faulty: Flags) -> None:
        """Count the rows of a block, `faulty` being those with a fault."""
        self.num_rows += len(faulty)
        self.num_faulty += int(faulty.sum())

    def note_zone(self, zone: str, why: str) -> None:
        """Remember in which zone times without one were read."""
        use = ZoneUse(zone, why)
        if use not in self.zone_uses:
            self.zone_uses.append(use)

    def list_zone_notes(self) -> list[str]:
        """Say in which zone times without one were read."""
        return [
            f"{self.label}: times without a zone are read as {use.zone}"
            + (f", {use.why}; --option zone=NAME reads them in another" if use.why else "")
            for use in self.zone_uses
        ]

    def list_problems(self, find_lines: FindLines) -> list[Problem]:
        """Return each kind of fault with the lines of the first rows that have it."""
        rows = [row for kind in self._kinds.values() for row, _ in kind.examples]
        lines = find_lines(sorted(set(rows)))
        found = []
        for (column, what, fix), kind in self._kinds.items():
            told = [lines[row] for row, _ in kind.examples if row in lines]
            more = ", …" if kind.num_rows > len(told) else ""
            word = "line" if len(told) == 1 else "lines"
            where = f"{self.label} {word} {', '.join(map(str, told))}{more}, column {column}"
            count = f" ({format_quantity(kind.num_rows, 'row')})" if kind.num_rows > 1 else ""
            value = kind.examples[0][1] if kind.examples else ""
            found.append(Problem(where, f"{value} {what}{count}".strip(), fix))
        return found

    def list_notes(self, find_lines: FindLines) -> list[str]:
        """Say which rows were left out, and why."""
        if not self._kinds:
            return []
        head = (
            f"{self.label}: {self.num_faulty:,} of {format_quantity(self.num_rows, 'row')} left out"
        )
        return [head, *(f"left out: {one}" for one in self.list_problems(find_lines))]

    def refuse_if_many(self, find_lines: FindLines) -> None:
        """Refuse the file where more rows are faulty than may be left out."""
        if self.fraction <= self.max_fraction:
            return
        faulty, rows = self.num_faulty + self.num_wrong_width, self.num_rows + self.num_wrong_width
        share = f"{faulty:,} of {format_quantity(rows, 'row')}"
        what = f"{share} cannot be right, so that its totals would be wrong"
        fix = "mend them"
        if self.fraction < _MOST_WORTH_READING:
            fix += f"; --option bad-rows={self.fraction + 0.01:.2f} reads the others"
        raise InputError([Problem(self.label, what, fix), *self.list_problems(find_lines)])

    @property
    def fraction(self) -> float:
        """The share of rows that are faulty or have a wrong width."""
        faulty = self.num_faulty + self.num_wrong_width
        return faulty / max(1, self.num_rows + self.num_wrong_width)


def _shown(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…")


def no_rows(count: int) -> Flags:
    """Return flags for `count` rows, none of them set."""
    return np.zeros(count, dtype=np.bool_)
