"""Megatron-Core's way to mark layers: an interval, or a Python list expression of marks.

`--moe-layer-freq "([0]*3+[1]*58)"` marks all but the first three of 61 layers. The expression is
read by a small parser here, never evaluated (megatron/training/arguments.py, `moe_freq_type`).
"""

import re
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.spec.model.layer_pattern import MAX_LAYERS
from meshwright.spec.serialization import format_value

_SAMPLE = "([0]*3+[1]*58)"
_TOKEN = re.compile(r"\s*(\d+|[\[\](),+*])")


def write_frequency(marks: tuple[int, ...]) -> str:
    """Write marks as the shortest expression made of runs, repeated where they repeat."""
    size = len(marks)
    for period in range(1, size // 2 + 1):
        if size % period == 0 and marks == marks[:period] * (size // period):
            return f"({_runs(marks[:period])})*{size // period}"
    return f"({_runs(marks)})"


def _runs(marks: tuple[int, ...]) -> str:
    parts = []
    start = 0
    for index in range(1, len(marks) + 1):
        if index == len(marks) or marks[index] != marks[start]:
            count = index - start
            parts.append(f"[{marks[start]}]*{count}" if count > 1 else f"[{marks[start]}]")
            start = index
    return "+".join(parts)


def read_frequency(value: Any, where: str) -> int | tuple[int, ...]:
    """Read an interval or a list of marks, whichever form it has."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _interval(value, where)
    if isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return _short_enough(tuple(value), where)
    if isinstance(value, str):
        text = value.strip()
        if text.isdecimal() and len(text) < 10:
            return _interval(int(text), where)
        return _expression(text, where)
    what = f"{format_value(value)} is not a layer frequency"
    raise InputError([Problem(where, what, f"write 1, or {_SAMPLE}")])


def expand_frequency(
    value: int | tuple[int, ...], layers: int, first: bool, where: str
) -> tuple[int, ...]:
    """Return one mark per layer; an interval marks its first layer, or all but its last."""
    if isinstance(value, tuple):
        if len(value) != layers:
            what = f"marks {len(value)} layers of a model that has {layers}"
            raise InputError([Problem(where, what, "mark every layer")])
        return value
    if first:
        return tuple(int(index % value == 0) for index in range(layers))
    return tuple(int((index + 1) % value != 0) for index in range(layers))


def _interval(value: int, where: str) -> int:
    if value < 1:
        raise InputError([Problem(where, f"{value} is not at least 1", "use 1")])
    return value


def _short_enough(marks: tuple[int, ...], where: str) -> tuple[int, ...]:
    if len(marks) > MAX_LAYERS:
        raise _too_many(where)
    return marks


def _too_many(where: str) -> InputError:
    return InputError([Problem(where, f"marks more than {MAX_LAYERS} layers", "mark fewer")])


def _expression(text: str, where: str) -> tuple[int, ...]:
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text) or not tokens:
        what = f"{format_value(text)} is not a list expression"
        raise InputError([Problem(where, what, f"write it like {_SAMPLE}")])
    parser = _Parser(tokens, where)
    marks = parser.sum(0)
    if parser.tokens:
        raise parser.error()
    return marks


class _Parser:
    """Recursive descent over `sum = product {+ product}`, `product = item {* number}`."""

    def __init__(self, tokens: list[str], where: str) -> None:
        self.tokens = tokens
        self.where = where

    def error(self) -> InputError:
        at = self.tokens[0] if self.tokens else "the end"
        return InputError(
            [Problem(self.where, f"cannot be read at {at!r}", f"write it like {_SAMPLE}")]
        )

    def take(self, *wanted: str) -> str:
        if not self.tokens or (wanted and self.tokens[0] not in wanted):
            raise self.error()
        return self.tokens.pop(0)

    def next_is(self, token: str) -> bool:
        return bool(self.tokens) and self.tokens[0] == token

    def sum(self, depth: int) -> tuple[int, ...]:
        if depth > 50:
            what = "nests more than 50 brackets"
            raise InputError([Problem(self.where, what, f"write it like {_SAMPLE}")])
        marks = self.product(depth)
        while self.next_is("+"):
            self.take("+")
            marks = _short_enough(marks + self.product(depth), self.where)
        return marks

    def product(self, depth: int) -> tuple[int, ...]:
        marks = self.item(depth)
        while self.next_is("*"):
            self.take("*")
            times = self.number()
            if times * len(marks) > MAX_LAYERS:
                raise _too_many(self.where)
            marks = marks * times
        return marks

    def item(self, depth: int) -> tuple[int, ...]:
        if self.next_is("("):
            self.take("(")
            marks = self.sum(depth + 1)
            self.take(")")
            return marks
        self.take("[")
        found: list[int] = []
        while not self.next_is("]"):
            found.append(self.number())
            if not self.next_is("]"):
                self.take(",")
        self.take("]")
        return tuple(found)

    def number(self) -> int:
        token = self.take()
        if not token.isdecimal() or len(token) > 9:
            raise self.error()
        return int(token)
