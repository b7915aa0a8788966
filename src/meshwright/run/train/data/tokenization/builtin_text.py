"""Text that every machine has: Python's documentation and sources, and arithmetic made up.

For demonstrations and tests of training without a network. The same interpreter gives the same
documents in the same order; other versions of Python give slightly other ones.
"""

import ast
import hashlib
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from random import Random

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.spec.units import parse_bytes

BUILTIN_SOURCE = "builtin"
"""What to write for a path: `builtin`, or `builtin:20MB` for so much of it."""
DEFAULT_BYTES = 8 * 10**6

_LEFT_OUT = frozenset(
    ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings",
     "pydoc_data", "lib2to3", "ensurepip", "turtledemo")
)  # fmt: skip
"""Installed packages, tests and tables: not there on every machine, or not worth reading."""
_ARITHMETIC_SHARE = 0.125
_LINES_PER_SHEET = 24


def is_builtin(path: str) -> bool:
    """Tell whether a path names the built-in text."""
    return path == BUILTIN_SOURCE or path.startswith(f"{BUILTIN_SOURCE}:")


def parse_builtin_bytes(path: str) -> int:
    """Return how much built-in text a path asks for."""
    _, given, size = path.partition(":")
    if not given:
        return DEFAULT_BYTES
    limit = parse_bytes(size, path)
    if limit < 1:
        raise InputError([Problem(path, "asks for no text", "ask for some, such as builtin:2MB")])
    return limit


def generate_builtin_documents(limit_bytes: int = DEFAULT_BYTES) -> Iterator[str]:
    """Yield documents of about `limit_bytes` in all, an eighth of it arithmetic.

    Sources and documentation come in an order that a hash of their names gives, so that any limit
    takes a fair share of everything; where they run out, the rest is left out.
    """
    written = summed = 0
    for text in _library():
        for document in (text, *_sheets(summed, written * _ARITHMETIC_SHARE)):
            summed += document is not text
            written += len(document.encode())
            yield document
            if written >= limit_bytes:
                return


def write_builtin_text(file: Path, limit_bytes: int = DEFAULT_BYTES) -> None:
    """Write the built-in text as JSON lines; the file appears whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    with convert_os_errors(file, "write"):
        with partial.open("w", encoding="utf-8") as opened:
            for text in generate_builtin_documents(limit_bytes):
                opened.write(json.dumps({"text": text}) + "\n")
        partial.replace(file)


def _library() -> Iterator[str]:
    """Yield the pages of the documentation and the modules of the library, mixed."""
    folder = Path(sysconfig.get_path("stdlib"))
    pages = _pages(folder)
    modules = _modules(folder)
    if not modules:
        what = "this Python keeps no sources of its library"
        raise MissingDependency(
            what, "install the standard library's .py files, or give text of yours"
        )
    for name in sorted([*pages, *modules], key=lambda one: hashlib.blake2b(one.encode()).digest()):
        text = pages[name] if name in pages else _source(folder / name)
        if text.strip():
            yield text


def _modules(folder: Path) -> list[str]:
    """Return the library's modules, by their paths."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        inside = Path(place).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if name.endswith(".py")]
    return found


def _pages(folder: Path) -> dict[str, str]:
    """Return the pages of the language reference that `help()` shows."""
    file = folder / "pydoc_data" / "topics.py"
    if not file.exists():
        return {}
    # Read, not run: the file is one assignment of a dict of texts.
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return {f"help/{name}": text for name, text in topics.items()}
    return {}


def _source(file: Path) -> str:
    try:
        with tokenize.open(file) as opened:  # knows the encoding that a module declares
            return opened.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _sheets(done: int, wanted_bytes: float) -> Iterator[str]:
    """Yield sheets of arithmetic, from the `done`-th on, until there is enough of it."""
    # A sheet has about 400 bytes; counting by sheets keeps each a function of its number.
    for number in range(done, round(wanted_bytes / 400)):
        yield _sheet(number)


def _sheet(number: int) -> str:
    draw = Random(f"arithmetic {number}")
    return "\n".join(_sum(draw) for _ in range(_LINES_PER_SHEET)) + "\n"


def _sum(draw: Random) -> str:
    digits = draw.randint(1, 3)
    one, other = draw.randrange(10**digits), draw.randrange(10**digits)
    match draw.choice("+-*/"):
        case "+":
            return f"{one} + {other} = {one + other}"
        case "-":
            return f"{one} - {other} = {one - other}"
        case "*":
            return f"{one % 100} * {other % 100} = {one % 100 * (other % 100)}"
        case _:
            other = other % 100 or 1
            return f"{one} / {other} = {one // other} remainder {one % other}"
