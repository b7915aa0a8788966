"""The order of a model's layers as one line: `3*dense 58*moe`, `8*(5*local global)`."""

import re
from functools import lru_cache

from meshwright.errors import InputError, Problem
from meshwright.spec.serialization import format_value

_TOKEN = re.compile(r"\s*(?:(\d+)\s*\*|([A-Za-z_][\w-]*)|([()]))")

MAX_LAYERS = 10_000
"""More layers than any model has; keeps a mistyped count from filling the memory."""


MAX_PERIOD = 64
"""Repetitions of more layers than this are written out, so that compressing stays quick."""


def is_block_name(text: str) -> bool:
    """Tell whether a pattern can name a block so."""
    return re.fullmatch(r"[A-Za-z_][\w-]*", text) is not None


@lru_cache(maxsize=1024)
def expand_pattern(pattern: str, where: str = "pattern") -> tuple[str, ...]:
    """Return the block name of every layer, first to last."""
    tokens = _tokens(pattern, where)
    names, rest = _sequence(tokens, 0, 0, where)
    if rest != len(tokens):
        raise InputError(
            [Problem(where, f"{format_value(pattern)} closes a bracket it never opened", "open it")]
        )
    if not names:
        raise InputError([Problem(where, "names no layer", "write it like 32*dense")])
    return tuple(names)


def compress_pattern(names: tuple[str, ...]) -> str:
    """Write a list of block names as a short pattern, from runs and repeated groups.

    Each suffix takes the shorter of two beginnings: a run of one name, or a group of names as
    often as it repeats there.
    """
    count = len(names)
    best = [""] * (count + 1)
    run = 0
    alike = [0] * (MAX_PERIOD + 1)  # from here on, names equal to those one period later
    for start in reversed(range(count)):
        run = run + 1 if names[start : start + 1] == names[start + 1 : start + 2] else 1
        best[start] = f"{_run(names[start], run)} {best[start + run]}".rstrip()
        for period in range(2, min(count - start - 1, MAX_PERIOD) + 1):
            alike[period] = alike[period] + 1 if names[start] == names[start + period] else 0
            repeats = alike[period] // period + 1
            if repeats > 1 and run < period:
                group = _runs(names[start : start + period])
                text = f"{repeats}*({group}) {best[start + repeats * period]}".rstrip()
                best[start] = min(best[start], text, key=len)
    return best[0]


def _run(name: str, count: int) -> str:
    return f"{count}*{name}" if count > 1 else name


def _runs(names: tuple[str, ...]) -> str:
    parts: list[str] = []
    start = 0
    for index in range(1, len(names) + 1):
        if index == len(names) or names[index] != names[start]:
            parts.append(_run(names[start], index - start))
            start = index
    return " ".join(parts)


def _tokens(pattern: str, where: str) -> list[str]:
    tokens, position = [], 0
    text = pattern.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise InputError(
                [
                    Problem(
                        where,
                        f"{format_value(pattern)} cannot be read at {text[position:][:12]!r}",
                        "write counts and block names, such as 3*dense 58*moe",
                    )
                ]
            )
        count, name, bracket = match.groups()
        tokens.append(f"{count}*" if count else name or bracket)
        position = match.end()
    return tokens


def _sequence(tokens: list[str], index: int, depth: int, where: str) -> tuple[list[str], int]:
    names: list[str] = []
    if depth > 20:
        raise InputError([Problem(where, "nests more than 20 brackets", "write the layers out")])
    while index < len(tokens) and tokens[index] != ")":
        times = 1
        if tokens[index].endswith("*"):
            times = int(tokens[index][:-1])
            index += 1
            if index == len(tokens) or tokens[index] == ")" or tokens[index].endswith("*"):
                raise InputError(
                    [Problem(where, f"{times}* is not followed by a block name", "add a name")]
                )
        if tokens[index] == "(":
            inner, index = _sequence(tokens, index + 1, depth + 1, where)
            if index == len(tokens):
                raise InputError([Problem(where, "opens a bracket it never closes", "close it")])
        else:
            inner = [tokens[index]]
        index += 1
        if len(names) + times * len(inner) > MAX_LAYERS:
            raise InputError([Problem(where, f"has more than {MAX_LAYERS} layers", "use fewer")])
        names += inner * times
    return names, index
