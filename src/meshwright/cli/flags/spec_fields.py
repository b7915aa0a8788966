"""Flags and environment variables made from the fields of a spec value.

A field `global_batch` of a layout becomes `--global-batch` and `MESHWRIGHT_LAYOUT_GLOBAL_BATCH`;
its documentation becomes the help, its type decides how text is read. A field that is a table of
its own, such as `adapter` of a training run, becomes a flag for each field of it: `--adapter-rank`.
Values stay text here: the strict reader turns them into numbers, so flags and files have the same
errors.
"""

import argparse
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_docs import FieldDoc, list_field_docs
from meshwright.spec.name_suggestions import build_unknown_name_problem

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def add_fields(
    parser: argparse.ArgumentParser,
    kind: type[msgspec.Struct],
    table: str,
    only: tuple[str, ...] = (),
) -> None:
    """Add one flag for every field of `kind`; parsed values land under `table.field`."""
    group = parser.add_argument_group(
        f"{table} (a file's [{table}] table, {variable_name(table, '*')})"
    )
    for field in list_fields(kind):
        if only and field.name.partition(".")[0] not in only:
            continue
        flag = flag_name(field.name)
        destination = f"{table}.{field.name}"
        if field.kind is bool:
            group.add_argument(
                flag,
                dest=destination,
                default=None,
                action=argparse.BooleanOptionalAction,
                help=_help(field),
            )
        else:
            group.add_argument(flag, dest=destination, metavar=_metavar(field), help=_help(field))


def list_fields(kind: type[msgspec.Struct]) -> tuple[FieldDoc, ...]:
    """Return the fields of a struct, and those of a table inside it as `table.field`."""
    found: list[FieldDoc] = []
    for field in list_field_docs(kind):
        inner = _table(field.kind)
        if inner is None:
            found.append(field)
        else:
            found += (
                one._replace(name=f"{field.name}.{one.name}") for one in list_field_docs(inner)
            )
    return tuple(found)


def flag_name(field: str) -> str:
    """Return the flag that sets a field: `--adapter-rank` sets `adapter.rank`."""
    return "--" + re.sub(r"[._]", "-", field)


def _table(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field holds where it can hold no other kind of one."""
    if get_origin(kind) not in (Union, types.UnionType):
        return None
    inner = [one for one in get_args(kind) if one is not types.NoneType]
    is_struct = isinstance(inner[0], type) and issubclass(inner[0], msgspec.Struct)
    return inner[0] if len(inner) == 1 and is_struct else None


def read_flag_values(args: argparse.Namespace, table: str) -> dict[str, Any]:
    """Return the fields of a table that were given as flags, as plain data."""
    prefix = f"{table}."
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix) and value is not None
    }


def coerce_values(kind: type[msgspec.Struct], data: Mapping[str, Any]) -> dict[str, Any]:
    """Split lists and read switches that came as text; all else is left to the strict reader."""
    kinds = {field.name: field.kind for field in list_fields(kind)}
    found: dict[str, Any] = {}
    for name, value in data.items():
        outer, _, inner = name.rpartition(".")
        into = found.setdefault(outer, {}) if outer else found
        into[inner] = _split(kinds.get(name), value, name)
    return found


def read_environment(
    kind: type[msgspec.Struct], table: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields of a table that environment variables set."""
    names = {variable_name(table, field.name): field.name for field in list_fields(kind)}
    problems = [
        build_unknown_name_problem("variable", name, names, "environment")
        for name in environment
        if name.startswith(variable_name(table, "")) and name not in names
    ]
    if problems:
        raise InputError(problems)
    found = {names[name]: text for name, text in environment.items() if name in names}
    try:
        return coerce_values(kind, found)
    except InputError as error:
        raise InputError(
            problem._replace(where=variable_name(table, problem.where))
            for problem in error.problems
        ) from None


def variable_name(table: str, field: str) -> str:
    """Return the environment variable that sets a field."""
    return f"MESHWRIGHT_{table}_{field.replace('.', '_')}".upper()


def _plain_kind(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(inner for inner in get_args(kind) if inner is not types.NoneType)
    return kind


def _split(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    kind = _plain_kind(kind)
    if get_origin(kind) is tuple:
        # Brackets are what a file has around the same list.
        return [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
    if kind is bool:
        if value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        raise InputError([Problem(name, f"{value!r} is neither true nor false", "use true")])
    return value


def _metavar(field: FieldDoc) -> str:
    kind = _plain_kind(field.kind)
    if get_origin(kind) is Literal:
        return "WORD"
    if get_origin(kind) is tuple:
        return "A,B"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "VALUE")


def _help(field: FieldDoc) -> str:
    text = field.doc.rstrip(".").replace("%", "%%").replace("`", "")
    kind = _plain_kind(field.kind)
    inner = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if get_origin(inner) is Literal:
        text += f" [{', '.join(str(choice) for choice in get_args(inner))}]"
    default = field.default
    if default in (None, (), msgspec.NODEFAULT):
        return text
    switch = {True: "on", False: "off"}
    shown = switch[default] if isinstance(default, bool) else default
    if isinstance(shown, tuple):
        shown = ",".join(map(str, shown))
    return f"{text} (default: {shown})"
