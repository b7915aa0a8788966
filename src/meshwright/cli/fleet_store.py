"""The store that commands of `mw fleet` work on."""

import argparse
import os

from meshwright.cli.parser import add_common
from meshwright.observe.fleet.store import Store

VARIABLE = "MESHWRIGHT_FLEET"


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the store, and those every command has."""
    parser.add_argument(
        "--store", metavar="FOLDER", default=os.environ.get(VARIABLE, "fleet"),
        help=f"where telemetry is kept (default: fleet, or ${VARIABLE})",
    )  # fmt: skip
    add_common(parser)


def open_store(args: argparse.Namespace, *, create: bool = False) -> Store:
    """Open the store that was named."""
    return Store(args.store, create=create)
