"""Flags and variables of a launcher's options: `--partition` or `MESHWRIGHT_SLURM_PARTITION`.

Options are of the site more often than of the job, so that a site can set them once as variables.
"""

import argparse
from collections.abc import Mapping
from typing import Any, TypeVar, get_origin

import msgspec

from meshwright.cli.flags.spec_fields import flag_name, variable_name
from meshwright.errors import InputError, Problem
from meshwright.spec.field_docs import FieldDoc, list_field_docs
from meshwright.spec.serialization import decode
from meshwright.spec.units import parse_bytes

O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741 - options
_OWN = ("folder",)
"""Set by a flag that every launcher has."""
_RENAMED = {
    "flags": "sbatch",
    "volume_claims": "volume_claim",
    "resources": "resource",
}
"""Flags that are given several times, once for each."""


def add_options(parser: argparse.ArgumentParser, kind: type[msgspec.Struct], table: str) -> None:
    """Add a flag for each option; a list is given one flag at a time."""
    group = parser.add_argument_group(f"{table} (or variables {variable_name(table, '*')})")
    for field in list_field_docs(kind):
        if field.name in _OWN:
            continue
        flag, destination = format_option_flag(field.name), f"{table}.{field.name}"
        text = field.doc.rstrip(".").replace("%", "%%").replace("`", "")
        if field.default not in (None, "", (), 0, False, msgspec.NODEFAULT):
            shown = "on" if field.default is True else str(field.default).replace("%", "%%")
            text += f" (default: {shown})"
        if field.kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, dest=destination, default=None, action=action, help=text)
        elif _many(field):
            text += "; may be given again"
            group.add_argument(flag, dest=destination, action="append", metavar="TEXT", help=text)
        else:
            group.add_argument(flag, dest=destination, metavar=_metavar(field), help=text)


def format_option_flag(name: str) -> str:
    """Return the flag that sets an option."""
    return flag_name(_RENAMED.get(name, name.removesuffix("_bytes")))


def read_options(
    kind: type[O], table: str, args: argparse.Namespace, environment: Mapping[str, str], **own: Any
) -> O:
    """Read the options of a launcher: variables first, flags over them."""
    values: dict[str, Any] = dict(own)
    for field in list_field_docs(kind):
        given = getattr(args, f"{table}.{field.name}", None)
        text = environment.get(variable_name(table, field.name))
        if given is None and text:
            given = [text] if _many(field) else text
        if given is None or given == []:
            continue
        values[field.name] = _value(field, given)
    needed = {one.name for one in msgspec.structs.fields(kind) if one.required}
    missing = [one for one in list_field_docs(kind) if one.name in needed - values.keys()]
    if missing:
        raise InputError(
            Problem(format_option_flag(one.name), "is missing", f"give the {_lower(one.doc)}")
            for one in missing
        )
    try:
        return decode(kind, values)
    except InputError as error:
        raise InputError(_flagged(problem) for problem in error.problems) from None


def _lower(doc: str) -> str:
    return doc[:1].lower() + doc[1:].rstrip(".")


def parse_named_values(words: list[str], flag: str) -> dict[str, str]:
    """Read `NAME=VALUE` words."""
    wrong = [word for word in words if not word.partition("=")[1] or word.startswith("=")]
    if wrong:
        raise InputError(
            Problem(flag, f"{word!r} sets nothing", "write it like NAME=VALUE") for word in wrong
        )
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def _flagged(problem: Problem) -> Problem:
    """Name the flag of a field that is wrong."""
    head, rest = problem.where.partition(".")[0].partition("[")[0], problem.where
    return problem._replace(where=format_option_flag(head) if head else rest)


def _value(field: FieldDoc, given: Any) -> Any:
    if field.kind is bool and isinstance(given, str):
        return given.lower() in ("1", "true", "yes", "on")
    if field.name.endswith("_bytes"):
        return parse_bytes(given, format_option_flag(field.name))
    return given


def _many(field: FieldDoc) -> bool:
    return get_origin(field.kind) is tuple


def _metavar(field: FieldDoc) -> str:
    if field.name.endswith("_bytes"):
        return "SIZE"
    return "N" if "int" in str(field.kind) else "TEXT"
