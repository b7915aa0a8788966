"""The interface of a command module and its entry in a table of commands.

Every command module has the same shape: `EXAMPLES` (lines that run as typed),
`configure(parser)` which adds its flags, and `run(args)` which returns a `CommandResult`.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple, Protocol

from meshwright.cli.result import CommandResult


class CommandModule(Protocol):
    """What a command module offers."""

    @property
    def EXAMPLES(self) -> tuple[str, ...]:  # noqa: N802 - a constant of the module
        """Command lines that run as typed."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the command."""

    def run(self, args: argparse.Namespace) -> CommandResult:
        """Run the command."""


class CommandEntry(NamedTuple):
    """One word after `mw`, or two."""

    summary: str
    group: str
    load: Callable[[], CommandModule]
    """Imports the module of the command."""
    takes_job_command: bool = False
    """Whether what follows `--` is the command line of a job, and none of our own words."""
