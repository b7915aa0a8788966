"""`--option NAME=VALUE` and `--column OURS=THEIRS`: how a source of telemetry is to be read."""

import argparse
from typing import NamedTuple

from meshwright.errors import InputError, Problem


class ReadingOptions(NamedTuple):
    """What one kind of source is told, and which columns of a list are which of ours."""

    kind_options: dict[str, str]
    columns: dict[str, str]


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add both flags."""
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="what one kind of source alone understands, such as zone=Europe/Berlin; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument(
        "--column", action="append", default=[], metavar="OURS=THEIRS",
        help="which column of a list of jobs is which of ours: gpus=num_gpus, end_s=finished; may "
        "be repeated",
    )  # fmt: skip


def read_source_options(args: argparse.Namespace) -> ReadingOptions:
    """Return what both flags were given."""
    return ReadingOptions(
        _read_pairs(args.option, "--option", "name=value"),
        _read_pairs(args.column, "--column", "gpus=num_gpus"),
    )


def _read_pairs(texts: list[str], flag: str, example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            what = f"{text!r} is no NAME=VALUE"
            raise InputError([Problem(flag, what, f"write {flag} {example}")])
        if found.setdefault(name, value) != value:
            what = f"{name} is given twice, as {found[name]!r} and as {value!r}"
            raise InputError([Problem(flag, what, "give it once")])
    return found
