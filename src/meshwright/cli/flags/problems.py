"""What is wrong with a work description, said in the words the user wrote it in.

A problem is traced to the file, variable or flag that set the value, and its fix is given as flags
where the work was given as flags.
"""

import argparse
import re
from collections.abc import Mapping
from typing import Any

from meshwright.cli.flags.spec_fields import flag_name, variable_name
from meshwright.errors import InputError, Problem
from meshwright.spec.job_spec import read_cluster, read_job_spec
from meshwright.spec.layout import Layout
from meshwright.spec.workload import TrainingWorkload

ARGUMENT, ENVIRONMENT, FLAG = "argument", "environment", "flag"

_STAND_IN = "h100-superpod"
"""The cluster that a layout is held against while its own cannot be read."""

_OF_CLUSTER = {"dp", "memory", "precision"}

_OF_DEGREES = {"dp", "global_batch", "memory", "sequence_length"}
"""What cannot be judged while the cluster, or a degree, is not known."""


def locate_problem(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """Say where a bad value was written: the file, the variable or the flag."""
    path = _path(problem.where)
    origin = next((o for known, o in origins.items() if path == known), None)
    if origin is None:
        origin = next((o for known, o in origins.items() if path.startswith(f"{known}.")), None)
    if origin in (None, ARGUMENT, "default", "layout"):
        flags = FLAG in origins.values() and path != problem.where
        return problem._replace(fix=rewrite_fields_as_flags(problem.fix)) if flags else problem
    part, _, field = path.partition(".")
    if origin == ENVIRONMENT:
        name = variable_name(part, field) if field else f"MESHWRIGHT_{part.upper()}"
        return problem._replace(where=f"{name} ({path})")
    if origin == FLAG:
        return problem._replace(
            where=flag_name(field or part), fix=rewrite_fields_as_flags(problem.fix)
        )
    return problem._replace(where=f"{origin}: {path}")


def _path(where: str) -> str:
    """Return the path in a work of a field that a check names alone."""
    for part, kind in (("layout", Layout), ("workload", TrainingWorkload)):
        if where in kind.__struct_fields__:
            return f"{part}.{where}"
    return where


def rewrite_fields_as_flags(text: str) -> str:
    """Write every `field=value` of a layout as the flag that sets it."""

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        return format_flag(name, value) if name in Layout.__struct_fields__ else match[0]

    return re.sub(r"\b([a-z_]+)=([\w,.+-]*[\w+-])", flag, text)


def format_flag(name: str, value: object) -> str:
    """Return the flag that sets a field of a layout, or says that it must go."""
    flag = flag_name(name)
    if value is None or value == ():
        return f"(no {flag})"
    if value is True or value == "true":
        return flag
    if value is False or value == "false":
        return f"--no-{flag.removeprefix('--')}"
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) else value
    return f"{flag} {text}"


def find_violations(data: Mapping[str, Any], problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Return what else is wrong with a work that cannot be read, so that it is mended once.

    Fields that could not be read are left out, and a cluster is stood in for; what depends on
    either is not judged.
    """
    layout = data.get("layout") or {}
    if not isinstance(layout, Mapping):
        return ()
    rest, known = dict(layout), {name: data[name] for name in data if name != "layout"}
    unsure: set[str] = set()
    try:
        read_cluster(known.get("cluster"))
    except InputError:
        known["cluster"], unsure = _STAND_IN, set(_OF_CLUSTER)
    left = -1
    while left != len(rest) + len(known):
        left = len(rest) + len(known)
        # Leaving a field out can put others at odds, which then are left out as well.
        for problem in problems:
            part, _, field = problem.where.partition(".")
            if part in ("gpus", "layout"):
                known.pop("gpus", None)
                rest.pop(field, None)
                unsure |= {field, *_OF_DEGREES}
            elif part == "workload":
                known.pop("workload", None)
        try:
            work = read_job_spec({**known, "layout": rest})
        except InputError as error:
            problems = error.problems
        else:
            return tuple(problem for problem in work.check() if problem.where not in unsure)
    return ()


def declare_flag_names(parser: argparse.ArgumentParser, **others: str) -> None:
    """Say that all settings of a command are flags; `others` are those of another name."""
    known = parser.get_default("setting_flags") or {}
    parser.set_defaults(setting_flags=known | others)


def rename_fields_to_flags(
    error: InputError, parser: argparse.ArgumentParser, args: argparse.Namespace
) -> None:
    """Name flags in place of settings in all problems of an error."""
    flags = _flags(parser, args)
    error.problems = tuple(
        problem._replace(
            where=flags.get(problem.where, problem.where),
            fix=_as_flags(problem.fix, flags, problem.where.rpartition(".")[0]),
        )
        for problem in error.problems
    )
    error.args = ("\n".join(map(str, error.problems)),)


def _flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """Return the flags by the settings that a problem may name."""
    others: dict[str, str] | None = getattr(args, "setting_flags", None)
    found = {
        action.dest: action.option_strings[-1]
        for action in parser._actions  # noqa: SLF001 - argparse has no public list
        if action.option_strings
        and (others is not None or getattr(args, action.dest, action.default) != action.default)
    }
    return found | (others or {})


def _as_flags(text: str, flags: Mapping[str, str], part: str) -> str:
    """Write every `setting=value` as a flag with its value, and every name in backticks as one."""

    def flag(match: re.Match[str]) -> str:
        written, alone, name, value = match.groups()
        if written:  # a flag with its value already
            return written
        found = flags.get(f"{part}.{alone or name}", flags.get(alone or name))
        if found is None:
            return match[0]
        return found if alone else f"{found} {value}"

    pattern = r"(--[a-z-]+ [a-z_]+=\S+)|`([a-z_.]+)`|\b([a-z_]+)=([\w,.+-]*[\w+-])"
    return re.sub(pattern, flag, text)
