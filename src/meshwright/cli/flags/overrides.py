"""`KEY=VALUE` words after a job file: values in place of the file's."""

import tomllib
from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError, Problem


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Turn `optimizer.lr=1e-4` into nested data; a value is TOML, or text where that fails."""
    data: dict[str, Any] = {}
    problems = []
    for word in words:
        path, equals, text = word.partition("=")
        names = [name.strip() for name in path.split(".")]
        inner, beside = data, False
        for name in names[:-1]:
            below = inner.setdefault(name, {})
            beside = beside or not isinstance(below, dict)
            inner = below if isinstance(below, dict) else {}
        if not equals or not all(names):
            problems.append(Problem(word, "changes nothing", "write it like optimizer.lr=1e-4"))
        elif beside:
            problems.append(Problem(word, "stands beside a value for all of it", "give one"))
        elif isinstance(inner.get(names[-1]), dict):
            problems.append(Problem(word, "stands beside values inside it", "give one of them"))
        else:
            inner[names[-1]] = _value(text.strip())
    if problems:
        raise InputError(problems)
    return data


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
