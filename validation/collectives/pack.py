"""Pack a list of measured rows by sweep, as `runs.json` holds those that the constants see.

    python -m validation.collectives.pack LIST.json > runs.json

Each row keeps the page it was read from.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.predict.validation.collectives import pack_sweeps, read_sweep_rows

RUNS = Path(__file__).with_name("runs.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack a list of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    sys.stdout.write(pack_sweeps(read_sweep_rows(parser.parse_args(arguments).file)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
