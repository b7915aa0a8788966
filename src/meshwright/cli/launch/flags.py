"""Flags and variables of a launcher's options: `--partition` or `MESHWRIGHT_SLURM_PARTITION`.

Options are of the site more often than of the job, so that a site can set them once as variables.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_origin

import msgspec

from meshwright.cli.flags.spec_fields import flag_name, variable_name
from meshwright.errors import InputError, Problem
from meshwright.redaction import is_secret
from meshwright.spec.field_checks import raise_problems
from meshwright.spec.field_docs import FieldDoc, list_field_docs
from meshwright.spec.serialization import decode
from meshwright.spec.units import parse_bytes

O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741 - options
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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


class GivenVariables(NamedTuple):
    """What `--env` sets."""

    values: dict[str, str]
    """Variables with their values."""
    inherited: tuple[str, ...]
    """Variables that are read where the job is started."""


def parse_variables(
    words: Sequence[str], launcher: str, *, plain_secrets: bool = False
) -> GivenVariables:
    """Read `NAME=VALUE` and `NAME` words of `--env`; the value of a secret is refused.

    The file that is written is often kept or sent on, and no place for a password.
    """
    values, inherited, problems = dict[str, str](), list[str](), list[Problem]()
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            if not _VARIABLE.fullmatch(name):
                fix = "write it like NAME=VALUE, or NAME alone"
                problems.append(Problem("--env", f"{word!r} sets nothing", fix))
            inherited.append(name)
        elif is_secret(name, value) and not plain_secrets:
            what = f"{name} looks like a secret, and its value would stand in the file"
            problems.append(Problem("--env", what, _SECRET_FIX[launcher].format(name=name)))
        else:
            values[name] = value
    raise_problems(problems)
    return GivenVariables(values, tuple(dict.fromkeys(inherited)))


_SECRET_FIX = {
    "slurm": "give --env {name} alone, which is read where sbatch is called, or --plain-secrets",
    "k8s": "give --env {name} alone, which is read from a Secret (--secret), or --plain-secrets",
    "ray": "give --env {name} alone, which the driver reads where it runs, or --plain-secrets",
}


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
