"""Typed access to the keys of a config: every fault is noted with its path, none is raised early.

A key is a path with dots (`attn_config.alibi`). Alternatives stand behind a bar, and the first of
them is the one that gets written: `num_local_experts|num_experts`. A reader that asks for a faulty
value gets a harmless stand-in and reads on, so that `raise_problems` can list all faults at once.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import MAX_COUNT, check_integer
from meshwright.spec.model.feedforward import Activation
from meshwright.spec.name_suggestions import format_suggestion
from meshwright.spec.serialization import format_value

W = TypeVar("W", bound=str)


class MissingKey:
    """Stands for a key that a config lacks, and for a default that a config class lacks."""


MISSING = MissingKey()

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "quick_gelu": "quick-gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""What configs call the non-linearities; the first name of each is the one written."""


def activation_key(activation: Activation, preferred: str = "") -> str:
    """Return the config's word for an activation, `preferred` where it means the same."""
    if ACTIVATIONS.get(preferred) == activation:
        return preferred
    # An activation without a word is written as ours, which no config reads: so it is refused.
    return next((word for word, ours in ACTIVATIONS.items() if ours == activation), activation)


class ConfigFields:
    """The keys of one config, or of one table in it."""

    def __init__(
        self, data: Mapping[str, Any], where: str = "", problems: list[Problem] | None = None
    ) -> None:
        self._data = data
        self._where = where
        self.problems = problems if problems is not None else []

    def raise_problems(self) -> None:
        """Raise every fault noted so far, in this table and in those around it."""
        if self.problems:
            raise InputError(self.problems)

    def add_problem(self, key: str, what: str, fix: str) -> None:
        """Note what is wrong with a key, and what would mend it."""
        self.problems.append(Problem(self._where + self._given(key), what, fix))

    def get(self, key: str) -> object:
        """Return what stands under a key, `MISSING` if nothing does."""
        for path in key.split("|"):
            found: object = self._data
            for part in path.split("."):
                found = found.get(part, MISSING) if isinstance(found, Mapping) else MISSING
            if found is not MISSING:
                return found
        return MISSING

    def has(self, key: str) -> bool:
        """Tell whether a key is there and not null."""
        return self.get(key) not in (MISSING, None)

    def with_key(self, key: str, value: object) -> "ConfigFields":
        """Return these keys with one more."""
        return ConfigFields({**self._data, key: value}, self._where, self.problems)

    def names(self) -> list[str]:
        """List the keys that are there."""
        return [str(key) for key in self._data]

    def _given(self, key: str) -> str:
        """Return the spelling of a key that the config uses, the first if it has none."""
        paths = key.split("|")
        return next((path for path in paths if self.get(path) is not MISSING), paths[0])

    def _absent(self, key: str, default: object) -> object:
        if default is MISSING:
            self.add_problem(key, "is missing", f"add {self._given(key)}")
        return default

    def integer(
        self, key: str, default: int | MissingKey = MISSING, least: int = 1, most: int = MAX_COUNT
    ) -> int:
        """Read a whole number."""
        data = self.get(key)
        if data is MISSING:
            data = self._absent(key, default)
        number = self._whole(key, data, least, most)
        return number if number is not None else max(least, 1)

    def optional_integer(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """Read a whole number that may be null."""
        data = self.get(key)
        if data is MISSING:
            data = default
        return None if data is None else self._whole(key, data, least, MAX_COUNT)

    def _whole(self, key: str, data: object, least: int, most: int) -> int | None:
        if isinstance(data, float) and data.is_integer():
            data = int(data)
        problems = check_integer(key, data, least, most)
        if not problems and isinstance(data, int):
            return data
        if not isinstance(data, MissingKey):
            for problem in problems:
                self.add_problem(key, problem.what, problem.fix)
        return None

    def number(self, key: str, default: float | MissingKey = MISSING) -> float:
        """Read a finite number."""
        data = self.get(key)
        if data is MISSING:
            data = self._absent(key, default)
        number = self._number(key, data)
        return number if number is not None else 1.0

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Read a finite number that may be null."""
        data = self.get(key)
        if data is MISSING:
            data = default
        return None if data is None else self._number(key, data)

    def _number(self, key: str, data: object) -> float | None:
        if isinstance(data, int | float) and not isinstance(data, bool):
            try:
                number = float(data)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
        if not isinstance(data, MissingKey):
            self.add_problem(key, f"{format_value(data)} is not a finite number", "such as 1.0")
        return None

    def flag(self, key: str, default: bool | MissingKey = MISSING) -> bool:
        """Read true or false; null is false, as the config classes have it."""
        data = self.get(key)
        if data is MISSING:
            data = self._absent(key, default)
        if isinstance(data, bool):
            return data
        if data is not None and not isinstance(data, MissingKey):
            self.add_problem(key, f"{format_value(data)} is not true or false", "use one of them")
        return False

    def text(self, key: str, default: str | MissingKey = MISSING) -> str:
        """Read a text."""
        data = self.get(key)
        if data is MISSING:
            data = self._absent(key, default)
        if isinstance(data, str):
            return data
        if not isinstance(data, MissingKey):
            self.add_problem(key, f"{format_value(data)} is not text", "write it in quotes")
        return ""

    def choice(self, key: str, words: Mapping[str, W], default: str | MissingKey = MISSING) -> W:
        """Read one of some words and return what it stands for."""
        text = self.text(key, default)
        if text in words:
            return words[text]
        if text or self.get(key) == "":
            what = f"{format_value(text)} is not one of {', '.join(words)}"
            self.add_problem(key, what, format_suggestion(text, words))
        return next(iter(words.values()))

    def activation(self, key: str, default: str | MissingKey = MISSING) -> Activation:
        """Read the name of a non-linearity; null is the default."""
        if self.get(key) is None and isinstance(default, str):
            return ACTIVATIONS[default]
        return self.choice(key, ACTIVATIONS, default)

    def list_items(self, key: str, most: int = 100_000) -> list[object] | None:
        """Read a list; None where there is none."""
        data = self.get(key)
        if data is MISSING or data is None:
            return None
        if isinstance(data, list) and len(data) <= most:
            return data
        self.add_problem(
            key, f"{format_value(data)} is not a list of at most {most:,} items", "leave it out"
        )
        return None

    def integers(self, key: str, least: int = 0) -> tuple[int, ...] | None:
        """Read a list of whole numbers; None where there is none."""
        data = self.list_items(key)
        if data is None:
            return None
        found = [self._whole(f"{key}[{i}]", item, least, MAX_COUNT) for i, item in enumerate(data)]
        return tuple(item for item in found if item is not None)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read a list of finite numbers; empty where there is none."""
        data = self.list_items(key) or []
        found = [self._number(f"{key}[{i}]", item) for i, item in enumerate(data)]
        return tuple(item for item in found if item is not None)

    def table(self, key: str) -> "ConfigFields | None":
        """Read a table; None where there is none. Its faults are noted here too."""
        data = self.get(key)
        if data is MISSING or data is None:
            return None
        if isinstance(data, Mapping):
            return ConfigFields(data, f"{self._where}{self._given(key)}.", self.problems)
        self.add_problem(key, f"{format_value(data)} is not a table", "write it in {}")
        return None

    def require_any(self, *keys: str) -> None:
        """Note a fault where none of these keys is there: a config that says no size is damaged."""
        keys = tuple(filter(None, keys))
        if not any(self.has(key) for key in keys):
            first, *others = (self._given(key) for key in keys)
            what = f"is missing, and so are {', '.join(others)}"
            self.add_problem(first, what, f"add {first}, or check that the file is whole")

    def require_value(self, key: str, value: object) -> None:
        """Note a fault unless the key is absent or has the one value that is understood."""
        data = self.get(key)
        # `True == 1`, so whether it is a switch is compared too.
        same = data == value and isinstance(data, bool) == isinstance(value, bool)
        if data is not MISSING and not same:
            self.add_problem(key, f"{format_value(data)} is not supported", f"only {value!r} is")


def set_key(config: dict[str, Any], key: str, value: object) -> None:
    """Set a key of a config that is being written, making tables along a dotted path."""
    *tables, last = key.split("|", maxsplit=1)[0].split(".")
    for part in tables:
        config = config.setdefault(part, {})
    config[last] = value
