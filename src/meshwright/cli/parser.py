"""The argument parser: argparse with our manners.

A mistake raises `InputError` with the nearest flag or command instead of ending the process, and
help opens with examples. Measured over a bare interpreter, argparse costs 14 ms where click costs
53, cyclopts 121 and tyro 122 (Python 3.12), which is why it is argparse.
"""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from meshwright.cli.command_entry import CommandEntry
from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import find_closest_names

DESCRIPTION = "Plan, predict, run and explain large-model training and inference on GPU clusters."

EXAMPLES = (
    "mw models llama3.1-8b",
    "mw layout check --model llama3.1-70b --cluster h100-superpod --gpus 64 --tp 8 --pp 2 --zero 1",
)

EPILOG = """exit codes: 0 done, 1 the answer is no, 2 your input is wrong, 3 this machine lacks
something, 4 a rank of several died, 70 our own fault, 130 or 143 a signal (SIGINT, SIGTERM) ended
it before it was done. Answers go to stdout, all else to stderr; --json works everywhere."""


class Parser(argparse.ArgumentParser):
    """argparse that raises, suggests, and remembers the commands it knows."""

    def error(self, message: str) -> NoReturn:
        """Raise the user's mistake with a suggestion."""
        raise InputError([Problem("", *_suggest(message, self))])

    def format_help(self) -> str:
        """Format help without the runs of blank lines argparse leaves."""
        return re.sub(r"\n{3,}", "\n\n", super().format_help())


def build_parser(chosen: str | None, command_table: Mapping[str, CommandEntry]) -> Parser:
    """Build the parser; only the chosen command's module is imported.

    Parsed arguments have the table as `command_table`, for shell completion.
    """
    parser = Parser(
        prog="mw",
        description=_opening(DESCRIPTION, EXAMPLES),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mw COMMAND [flags]",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="mw")
    parser.set_defaults(command_table=command_table)
    for name, command in command_table.items():
        if name == chosen:
            home = command.load()
            sub = commands.add_parser(
                name,
                help=command.summary,
                description=_opening(_sentence(command.summary), home.EXAMPLES),
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            home.configure(sub)
        else:
            commands.add_parser(name, help=command.summary, add_help=False)
    return parser


def join_words(words: Sequence[str], command_table: Mapping[str, CommandEntry]) -> list[str]:
    """Return the words of a command line, a command of two words as one of them."""
    found = list(words)
    at = next((place for place, word in enumerate(found) if not word.startswith("-")), 0)
    pair = " ".join(found[at : at + 2])
    if pair in command_table:
        found[at : at + 2] = [pair]
    return found


COMMON = ("--json", "-q", "--quiet", "--no-color", "--debug")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags every command has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the answer as JSON")
    group.add_argument("-q", "--quiet", action="store_true", help="print only the key values")
    group.add_argument("--no-color", action="store_true", help="no colours (NO_COLOR works too)")
    group.add_argument("--debug", action="store_true", help="show tracebacks of our own faults")


def add_verbs(
    parser: argparse.ArgumentParser,
    table: Iterable[tuple[str, str, tuple[str, ...]]],
    *,
    required: bool = True,
) -> dict[str, argparse.ArgumentParser]:
    """Add the second words of a command; each row is the verb, its summary and its examples."""
    subparsers = parser.add_subparsers(
        dest="verb", metavar="VERB", title="verbs", prog=parser.prog, required=required
    )
    return {
        verb: subparsers.add_parser(
            verb,
            help=summary,
            description=_opening(_sentence(summary), examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for verb, summary, examples in table
    }


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


def _opening(about: str, examples: Iterable[str]) -> str:
    lines = "\n".join(f"  {example}" for example in examples)
    return f"{about}\n\nexamples:\n{lines}"


def _suggest(message: str, parser: argparse.ArgumentParser) -> tuple[str, str]:
    choice = re.search(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if choice:
        kind, given, known = choice.groups()
        names = re.findall(r"[\w.+-]+", known)
        close = find_closest_names(given, names)
        fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
        word = {"COMMAND": "command", "VERB": "verb"}.get(kind)
        what = f"there is no {word} {given!r}" if word else f"{kind}: {given!r} is not a choice"
        return what, fix
    unknown = re.search(r"unrecognized arguments: (.*)", message)
    if unknown:
        given = (unknown.group(1).split() or [""])[0].split("=")[0]
        if given in COMMON:  # every command and verb has it, after its name
            words = parser.prog.split()
            first = "verb" if len(words) > 2 else "command"
            line = parser.prog if len(words) > 1 else "mw COMMAND"
            return f"{given} stands before the {first}", f"write it last: {line} … {given}"
        options = parser._option_string_actions  # noqa: SLF001 - argparse has no public list
        # Compared without the dashes, which all flags share and which make any two look similar.
        flags = {flag.lstrip("-"): flag for flag in options}
        close = find_closest_names(given.lstrip("-"), flags)
        fix = f"did you mean {flags[close[0]]}?" if close else f"see {parser.prog} --help"
        return f"unknown argument {given!r}", fix
    return message, f"see {parser.prog} --help"
