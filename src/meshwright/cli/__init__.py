"""The command line: `mw COMMAND`, one thin module per command, and nothing loaded early."""

import sys

try:
    from meshwright.cli.entry_point import main
except KeyboardInterrupt:  # a Ctrl-C while modules load, when there is nothing to end yet
    sys.stderr.write("interrupted\n")
    raise SystemExit(130) from None

__all__ = ["main"]
