"""Read rows of published measurements: as a plain list, or packed by system as `runs.json` is.

    python -m validation.collectives.rows LIST.json > runs.json

packs a list. A row is what one benchmark printed for one size; `runs.json` holds the rows that the
constants were fitted to, with the page each was read from.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import DamagedFile

Row = Mapping[str, Any]

RUNS = Path(__file__).with_name("runs.json")
SHARED = (
    "system",
    "source",
    "gpu",
    "nodes",
    "gpus",
    "gpus_per_node",
    "intra",
    "inter",
    "library",
    "tool",
    "nccl_version",
    "collective",
    "algo",
    "note",
)
COLUMNS = ("size_bytes", "time_us", "busbw_GBps")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file in either shape."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFile(f"{path} is not JSON: {error}") from None
    if isinstance(data, dict) and isinstance(data.get("sweeps"), list):
        return list(_unpacked(data["sweeps"]))
    if isinstance(data, list) and all(isinstance(row, dict) for row in data):
        return data
    raise DamagedFile(f"{path} holds neither a list of rows nor packed sweeps")


def _unpacked(sweeps: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for sweep in sweeps:
        shared = {name: sweep.get(name) for name in SHARED}
        for values in sweep["rows"]:
            yield {**shared, **dict(zip(COLUMNS, values, strict=True))}


def packed(rows: Iterable[Row]) -> str:
    """Return rows as JSON text in which every sweep states what its rows share once."""
    sweeps: dict[str, dict[str, Any]] = {}
    for row in rows:
        shared = {name: row.get(name) for name in SHARED if row.get(name) is not None}
        # The page is enough; its line differs from row to row.
        shared["source"] = str(row.get("source", "")).partition("#")[0]
        sweep = sweeps.setdefault(json.dumps(shared), {**shared, "rows": []})
        sweep["rows"].append([row.get(name) for name in COLUMNS])
    lines = ",\n".join(json.dumps(sweep, ensure_ascii=False) for sweep in sweeps.values())
    head = json.dumps({"columns": COLUMNS})[:-1]
    return f'{head}, "sweeps": [\n{lines}\n]}}\n'


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack a list of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    sys.stdout.write(packed(read_rows(parser.parse_args(arguments).file)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
