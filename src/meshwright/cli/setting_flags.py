"""Problems that name a setting, said by the flag of the command that sets it.

What checks a value knows it by its field (`batch_tokens`) and not by who wrote it. A command's user
wrote `--batch-tokens`, so problems are renamed on their way to the screen, in one place for all
commands. A flag that was not given is named only where a command has no other way to set things:
elsewhere the value may be of a file.

A problem says `field=value` or, where it has no value to give, the field in backticks. Fields of a
part (`training.tp`) are named whole where the problem is, and by themselves in its fix.
"""

import argparse
import re
from collections.abc import Mapping

from meshwright.errors import InputError


def only_flags_set(parser: argparse.ArgumentParser, **others: str) -> None:
    """Say that all settings of a command are flags; `others` are those of another name."""
    known = parser.get_default("setting_flags") or {}
    parser.set_defaults(setting_flags=known | others)


def say_as_flags(
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
        alone, name, value = match.groups()
        found = flags.get(f"{part}.{alone or name}", flags.get(alone or name))
        if found is None:
            return match[0]
        return found if alone else f"{found} {value}"

    return re.sub(r"`([a-z_.]+)`|\b([a-z_]+)=([\w,.+-]*[\w+-])", flag, text)
