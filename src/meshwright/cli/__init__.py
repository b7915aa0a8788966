"""The command line: `mw COMMAND`, one thin module per command, and nothing loaded early."""

from meshwright.cli.main import main

__all__ = ["main"]
