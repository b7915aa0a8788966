"""Spec values in files: TOML, JSON and YAML, told apart by the file's ending."""

import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.read import plain, read

V = TypeVar("V", bound=msgspec.Struct)

FORMATS = (".toml", ".json", ".yaml", ".yml")


def load(kind: type[V], path: str | Path) -> V:
    """Read one spec value from a file; every problem names the file and the field."""
    return read(kind, load_data(path), f"{Path(path)}: ")


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
    except (OSError, ValueError) as error:
        raise InputError([Problem(str(path), f"cannot be read as text: {error}")]) from None


def parse(text: str, ending: str, where: str) -> object:
    """Parse text in one of the known formats."""
    try:
        if ending == ".toml":
            return tomllib.loads(text)
        if ending == ".json":
            return json.loads(text)
        return _yaml().safe_load(text)
    except RecursionError:
        raise InputError([Problem(where, "is nested too deeply", "write it flatter")]) from None
    except ValueError as error:
        raise InputError([Problem(where, f"is not valid {ending[1:].upper()}: {error}")]) from None
    except Exception as error:
        # PyYAML's errors share no base with ValueError, and it leaks others on odd input.
        if ending in (".yaml", ".yml"):
            line = " ".join(str(error).split())
            raise InputError([Problem(where, f"is not valid YAML: {line}")]) from None
        raise


def dump(value: msgspec.Struct, ending: str = ".toml") -> str:
    """Write a spec value as text that `load` reads back to an equal value."""
    return dump_data(plain(value), ending)


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
