"""Tests that spec values share: each says what is wrong with one field, all are raised at once.

The functions return problems; `FieldChecker` collects them for a value with many fields. They know
numbers and names, not what a GPU or a workload is.
"""

import math
import re
from collections.abc import Collection, Iterable
from typing import TypeGuard

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import format_suggestion
from meshwright.spec.serialization import UNREADABLE, format_value

MAX_COUNT = 10**18
"""No count in a spec is larger, so that no sum over counts can overflow a float."""


def check_integer(name: str, value: object, least: int = 1, most: int = MAX_COUNT) -> list[Problem]:
    """Say what is wrong with a value that must be a whole number from `least` to `most`."""
    if type(value) is int and least <= value <= most:
        return []
    # The general limit is no news to someone who wrote 0.
    within = f"of at least {least}" if most == MAX_COUNT else f"from {least} to {most:,}"
    fix = f"use {least} or more"
    if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
        fix = f"use {min(max(round(value), least), most)}"
        within = within if value <= most else f"up to {most:,}"
    return [Problem(name, f"{format_value(value)} is not a whole number {within}", fix)]


def check_number(name: str, value: object, least: float, most: float) -> list[Problem]:
    """Say what is wrong with a value that must be a number from `least` to `most`."""
    if _is_number(value) and least <= value <= most:
        return []
    fix = f"use {most:g}" if _is_number(value) and value > most else f"use {least:g} or more"
    return [Problem(name, f"{format_value(value)} is not a number from {least:g} to {most:g}", fix)]


def check_choice(name: str, value: object, allowed: Collection[str]) -> list[Problem]:
    """Say what is wrong with a value that must be one of the allowed words."""
    if isinstance(value, str) and value in allowed:
        return []
    what = f"{format_value(value)} is not one of {', '.join(allowed)}"
    return [Problem(name, what, format_suggestion(value, allowed))]


def get_root_field(where: str) -> str:
    """Return the field that the path of a problem begins with: `tiers` of `tiers[0].nodes`."""
    return re.split(r"[.\[]", where, maxsplit=1)[0]


def raise_problems(*found: Iterable[Problem]) -> None:
    """Raise one `InputError` with every problem found, or nothing where there is none."""
    problems = [problem for group in found for problem in group]
    if problems:
        raise InputError(problems)


class FieldChecker:
    """Collects the problems of one value, field by field; a None is a figure that is not known."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, where: str, what: str, fix: str) -> None:
        """List a problem that no ready-made test covers."""
        self.problems.append(Problem(where, what, fix))

    def is_valid(self, *names: str) -> bool:
        """Tell whether these fields have no problem so far: a rule between fields asks it first."""
        faulty = {get_root_field(problem.where) for problem in self.problems}
        return faulty.isdisjoint(names)

    def mark_unreadable(self, **fields: object) -> None:
        """Note fields that their reader already refused, so that no rule between fields uses them.

        Numbers and words need no such care: their own tests refuse what stands in for them.
        """
        for name, value in fields.items():
            if value is UNREADABLE:
                self.add(name, "could not be read", "mend it first")

    def positive(self, **fields: object) -> None:
        """Require finite numbers above zero."""
        for name, value in fields.items():
            if value is not None and not (_is_finite(value) and value > 0):
                self.add(
                    name, f"{format_value(value)} is not a finite number above 0", _sign_fix(value)
                )

    def not_negative(self, **fields: object) -> None:
        """Require finite numbers from zero up."""
        for name, value in fields.items():
            if value is not None and not (_is_finite(value) and value >= 0):
                self.add(
                    name,
                    f"{format_value(value)} is not a finite number from 0 up",
                    _sign_fix(value),
                )

    def count(self, least: int = 1, **fields: object) -> None:
        """Require whole numbers of at least `least`."""
        for name, value in fields.items():
            if value is not None:
                self.problems += check_integer(name, value, least)

    def not_empty(self, **fields: object) -> None:
        """Require texts that are not empty."""
        for name, value in fields.items():
            if not isinstance(value, str) or not value.strip():
                self.add(name, f"{format_value(value)} is not a name", "give it some text")

    def one_of(self, name: str, value: object, allowed: Collection[str]) -> None:
        """Require one of the allowed words."""
        self.problems += check_choice(name, value, allowed)

    def raise_problems(self) -> None:
        """Raise what was found, if anything was."""
        raise_problems(self.problems)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sign_fix(value: object) -> str:
    """Say what to write for a number that must not be negative."""
    return f"use {-value:g}" if _is_finite(value) and value < 0 else "give a number such as 1.5"


def _is_finite(value: object) -> TypeGuard[float]:
    return _is_number(value) and abs(value) <= 1e300
