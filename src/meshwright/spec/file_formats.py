"""Spec values in files: TOML, JSON and YAML, told apart by the file's ending."""

import json
import re
import tomllib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.serialization import decode, encode, format_value

_MERGE = "tag:yaml.org,2002:merge"
MAX_KEY_PARTS = 100
"""A TOML key of more parts, `a.b.c`, is taken for a mistake."""
V = TypeVar("V", bound=msgspec.Struct)

FORMATS = (".toml", ".json", ".yaml", ".yml")
MAX_VALUES = 1_000_000
"""A YAML file whose aliases stand for more than this is taken for a mistake."""


def load(kind: type[V], path: str | Path) -> V:
    """Read one spec value from a file; every problem names the file and the field."""
    return decode(kind, load_data(path), f"{Path(path)}: ")


def load_data(path: str | Path) -> dict[str, Any]:
    """Read a file into plain data, or say what is wrong with it."""
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise InputError(
            [Problem(str(path), f"unknown ending {path.suffix!r}", f"use {', '.join(FORMATS)}")]
        )
    data = parse(read_text(path), ending, str(path))
    if not isinstance(data, dict):
        what = "the top of the file is not a table of fields"
        raise InputError([Problem(str(path), what, "start it with a field, such as a name")])
    return cast(dict[str, Any], data)


def read_text(path: str | Path) -> str:
    """Read a text file, or say why it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError([Problem(str(path), "there is no such file", "check the path")]) from None
    except OSError as error:
        what = f"cannot read as text: {error.strerror or error}"
        raise InputError([Problem(str(path), what, "give a file that you may read")]) from None
    except ValueError as error:
        what = f"cannot read as text: {error}"
        raise InputError([Problem(str(path), what, "save it as UTF-8 text")]) from None


def parse(text: str, ending: str, where: str) -> object:
    """Parse text in one of the known formats."""
    try:
        if ending == ".toml":
            _refuse_long_keys(text, where)
            return tomllib.loads(text)
        if ending == ".json":
            return json.loads(text, object_pairs_hook=partial(_object, where))
        return _parse_yaml(text, where)
    except RecursionError:
        raise InputError([Problem(where, "is nested too deeply", "write it flatter")]) from None
    except InputError:
        raise
    except Exception as error:
        # PyYAML's errors share no base with ValueError, and it leaks others on odd input.
        if not isinstance(error, ValueError) and ending not in (".yaml", ".yml"):
            raise
        kind = "YAML" if ending == ".yml" else ending[1:].upper()
        what = f"is not valid {kind}: {' '.join(str(error).split())}"
        fix = f"mend that place, or change the ending if the file is not {kind}"
        raise InputError([Problem(where, what, fix)]) from None


def _refuse_long_keys(text: str, where: str) -> None:
    """Refuse a TOML key of many parts: the time and memory it takes grow with their square."""
    found = _LONG_KEY.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        what = f"line {line} has a key of more than {MAX_KEY_PARTS} parts"
        raise InputError([Problem(where, what, "write it flatter")])


_KEY_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"{_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{{MAX_KEY_PARTS}}}")


def _object(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; one that stands there twice must have one value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        for name, value in pairs:
            if value != fields[name]:
                what = f"has {format_value(name)} twice, with different values"
                raise InputError([Problem(where, what, "keep one of them")])
    return fields


def _parse_yaml(text: str, where: str) -> object:
    """Parse YAML whose aliases stand for a bounded amount of data."""
    loader = _yaml().SafeLoader(text)
    try:
        top = loader.get_single_node()
        if top is None:
            return None
        _size(top, {}, where)
        return loader.construct_document(top)
    finally:
        loader.dispose()


def _size(node: Any, sizes: dict[int, int], where: str) -> int:
    """Count the values a node stands for with its aliases written out; each is counted once.

    A node without a size yet, met again, holds itself.
    """
    key = id(node)
    if key not in sizes:
        sizes[key] = 0
        inner = node.value if isinstance(node.value, list) else []
        _refuse_repeated_keys(inner, where)
        # A mapping holds pairs of nodes, a sequence nodes.
        parts = [part for item in inner for part in (item if type(item) is tuple else (item,))]
        sizes[key] = 1 + sum(_size(part, sizes, where) for part in parts)
        if sizes[key] > MAX_VALUES:
            what = f"holds more than {MAX_VALUES:,} values with its aliases written out"
            raise InputError([Problem(where, what, "leave out what the aliases multiply")])
    elif not sizes[key]:
        what = f"line {node.start_mark.line + 1} holds itself through an alias"
        raise InputError([Problem(where, what, "write the inner part out, without the alias")])
    return sizes[key]


def _refuse_repeated_keys(pairs: list[Any], where: str) -> None:
    """Refuse a YAML mapping that has a key twice, as YAML does; PyYAML takes the last value."""
    counts = Counter(
        (key.tag, key.value)
        for key, _ in (item for item in pairs if type(item) is tuple)
        if isinstance(key.value, str) and key.tag != _MERGE
    )
    twice = next((value for (_, value), count in counts.items() if count > 1), None)
    if twice is not None:
        what = f"has {format_value(twice)} twice in one table"
        raise InputError([Problem(where, what, "keep one of them")])


def dump(value: msgspec.Struct, ending: str = ".toml") -> str:
    """Write a spec value as text that `load` reads back to an equal value."""
    return dump_data(encode(value), ending)


def dump_data(data: dict[str, Any], ending: str) -> str:
    """Write plain data in one of the known formats."""
    if ending == ".json":
        return json.dumps(data, indent=2) + "\n"
    if ending in (".yaml", ".yml"):
        return cast(str, _yaml().safe_dump(data, sort_keys=False))
    # TOML has no null: a missing key means the default, which None always is in the spec.
    import tomli_w

    return tomli_w.dumps(_without_none(data))


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(item) for key, item in data.items() if item is not None}
    if isinstance(data, list):
        return [_without_none(item) for item in data]
    return data


def _yaml() -> Any:
    import yaml

    return yaml
