"""`FrameworkConfig`: one target's settings as flat keys, read once each with every fault collected.

It knows types and spelling, nothing of what a setting means. Values come from a shell (text) or
from a file (typed), so a number may arrive as either.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import find_closest_names
from meshwright.spec.serialization import format_value

T = TypeVar("T")

MAX_INTEGER = 10**12
"""Larger than any size a cluster or a model has; keeps arithmetic on typing errors small."""

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


class FrameworkConfig:
    """Named values with a record of what was read and what was wrong."""

    def __init__(
        self,
        values: Mapping[str, Any],
        known: Iterable[str],
        label: Callable[[str], str] = str,
    ) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._label = label
        self.known = frozenset(known)
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []

    def label(self, key: str) -> str:
        """Return the setting as the user writes it."""
        return self._label(key)

    def has(self, key: str) -> bool:
        """Tell whether the setting is present."""
        assert key in self.known, key
        return key in self._values

    def raw(self, key: str) -> Any:
        """Return the value as it stands, None where absent."""
        assert key in self.known, key
        return self._values.get(key)

    def add_implied(self, values: Mapping[str, Any]) -> None:
        """Add settings that another setting stands for."""
        self._values |= {key: value for key, value in values.items() if value is not None}

    def add_problem(self, key: str, what: str, fix: str) -> None:
        """Record that a setting is wrong; reading goes on and fails at the end."""
        self.problems.append(Problem(self.label(key), what, fix))

    def add_note(self, key: str, what: str, fix: str = "") -> None:
        """Record that a setting says something that a `Layout` or `Model` cannot hold."""
        self.notes.append(Problem(self.label(key), what, fix))

    def integer(self, key: str, default: int, least: int = 1) -> int:
        """Read a whole number."""
        found = self.optional_integer(key, least)
        return default if found is None else found

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        """Read a whole number that may be absent."""
        value = self.raw(key)
        if value is None:
            return None
        number = _as_whole(value)
        if number is None or not least <= number <= MAX_INTEGER:
            within = (
                f"of at least {least}"
                if number is None or number <= MAX_INTEGER
                else f"up to {MAX_INTEGER:,}"
            )
            fix = f"give a whole number such as {max(least, 1)}"
            self.add_problem(key, f"{format_value(value)} is not a whole number {within}", fix)
            return None
        return number

    def number(self, key: str, default: float) -> float:
        """Read a finite number."""
        found = self.optional_number(key)
        return default if found is None else found

    def optional_number(self, key: str) -> float | None:
        """Read a finite number that may be absent."""
        value = self.raw(key)
        if value is None:
            return None
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.add_problem(
                key, f"{format_value(value)} is not a number", "give a number such as 1.5"
            )
            return None
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """Read a switch."""
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        self.add_problem(key, f"{format_value(value)} is not true or false", "write true or false")
        return default

    def text(self, key: str) -> str | None:
        """Read a text that may be absent."""
        value = self.raw(key)
        if value is None or isinstance(value, str):
            return value
        self.add_problem(key, f"{format_value(value)} is not text", "write a word")
        return None

    def choice(self, key: str, choices: Mapping[str, T], default: T) -> T:
        """Read one of a set of words and return what it stands for."""
        value = self.raw(key)
        if value is None:
            return default
        word = str(value).strip()
        if word in choices:
            return choices[word]
        close = find_closest_names(word, choices)
        fix = f"did you mean {close[0]}?" if close else f"use {next(iter(choices))}"
        self.add_problem(key, f"{format_value(value)} is not one of {', '.join(choices)}", fix)
        return default

    def list_words(self, key: str) -> tuple[str, ...] | None:
        """Read a list of words, given as a list or as one text with spaces or commas."""
        value = self.raw(key)
        if value is None:
            return None
        items = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(item for item in items if item)
        self.add_problem(
            key, f"{format_value(value)} is not a list of words", "write words with spaces between"
        )
        return None

    def raise_problems(self) -> None:
        """Raise everything that was wrong."""
        if self.problems:
            raise InputError(self.problems)


def _as_whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d[\d_]{0,30}\s*", value):
        try:
            return int(value)
        except ValueError:
            return None
    return None


class UnreadKeys(NamedTuple):
    """The settings of a text that are not read, sorted by whether the target has them."""

    ignored: tuple[str, ...]
    """Labels of settings that the target has and that have no bearing here."""
    mistyped: int
    """How many nearly have the name of a known one."""
    unknown: int
    """How many the target does not have, as far as is known here."""


LEAF_CUTOFF = 0.8
"""Likeness that the last parts of two dotted names need: a long section name alone is no match."""


def classify_unread(
    given: Iterable[str],
    settings: FrameworkConfig,
    ignore: re.Pattern[str],
    what: str,
    *,
    cutoff: float = 0.86,
    real: frozenset[str] | None = None,
    also: Iterable[str] = (),
) -> UnreadKeys:
    """Sort the settings that are not read; report the mistyped ones and the ones nobody knows.

    A name that nearly is a known one is taken for a typing error, because passing over it would
    silently change the layout. Where `ignore` covers whole sections, `real` names the fields in
    them that exist and only look like a typing error. `also` are further names to be mistyped.
    """
    ignored = []
    mistyped = strange = 0
    labels = {*also, *(settings.label(key) for key in settings.known)}
    for key in given:
        label = settings.label(key)
        if key in settings.known:
            continue
        passed = ignore.fullmatch(key) is not None
        close = None
        if not passed or (real is not None and key not in real):
            close = _nearly(label, labels, cutoff)
        if close is not None:
            mistyped += 1
            settings.problems.append(Problem(label, f"is not a {what}", f"did you mean {close}?"))
        elif passed:
            ignored.append(label)
        else:
            strange += 1
            settings.notes.append(
                Problem(label, f"is not a {what} this bridge knows", "check that it has no bearing")
            )
    return UnreadKeys(tuple(ignored), mistyped, strange)


def _nearly(label: str, labels: Iterable[str], cutoff: float) -> str | None:
    """Return the known name that this one nearly is."""
    leaf = label.rpartition(".")[2]
    for close in difflib.get_close_matches(label, labels, n=3, cutoff=cutoff):
        parts = difflib.SequenceMatcher(None, leaf, close.rpartition(".")[2])
        if parts.ratio() >= LEAF_CUTOFF:
            return close
    return None


def flatten(data: Mapping[str, Any], prefix: str = "", depth: int = 8) -> dict[str, Any]:
    """Return nested tables as one table of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth:
            flat.update(flatten(value, f"{path}.", depth - 1))
        else:
            flat[path] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested tables, the inverse of `flatten`."""
    data: dict[str, Any] = {}
    for path, value in flat.items():
        table = data
        *tables, last = path.split(".")
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return data
