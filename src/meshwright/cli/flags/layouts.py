"""Layouts on the command line, one after the other: `--layout "tp=2,pp=2"`, or a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.flags.spec_fields import coerce_values
from meshwright.errors import InputError, Problem
from meshwright.spec.file_formats import FORMATS, load_data
from meshwright.spec.layout import Layout
from meshwright.spec.serialization import decode

LAYOUT_EXAMPLE = '--layout "tp=2,sequence_parallel=true"'


def read_layouts(texts: Sequence[str]) -> list[Layout]:
    """Read all layouts, listing every problem of all of them at once."""
    found, problems = [], []
    for number, text in enumerate(texts, 1):
        where = format_layout_position(number, len(texts))
        try:
            found.append(_layout(text, where))
        except InputError as error:
            problems += [
                problem._replace(where=nest_location(where, problem.where))
                for problem in error.problems
            ]
    if problems:
        raise InputError(problems)
    return found


def format_layout_position(number: int, count: int) -> str:
    """Return what a layout is called in a message, counted from 1."""
    return "--layout" if count == 1 else f"--layout {number}"


def nest_location(where: str, inner: str) -> str:
    """Return where something is that lies within a layout."""
    return inner if inner.startswith("--") else f"{where}: {inner}".removesuffix(": ")


def _layout(text: str, where: str) -> Layout:
    """Read a layout from a file, or from pairs; what has no key goes on with the last value."""
    if Path(text).suffix.lower() in FORMATS:
        data: Mapping[str, Any] = load_data(text)
        inner = data.get("layout", data)
        return decode(Layout, inner)
    pairs: dict[str, str] = {}
    key = ""
    for piece in text.split(","):
        name, equals, value = piece.partition("=")
        if equals:
            key = name.strip().replace("-", "_")
            pairs[key] = value.strip()
        elif key and piece.strip():
            pairs[key] += f",{piece.strip()}"
        else:
            what = f"{piece.strip()!r} is no KEY=VALUE"
            raise InputError([Problem(where, what, f"write it like {LAYOUT_EXAMPLE}")])
    return decode(Layout, coerce_values(Layout, pairs))
