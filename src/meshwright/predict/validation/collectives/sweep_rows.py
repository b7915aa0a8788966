"""Read rows of measured collectives: a plain list, or packed by sweep.

A row is what one benchmark printed for one size. Packed, every sweep states once what its rows
share, as `validation/collectives/runs.json` does.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.spec.file_formats import read_text

Row = Mapping[str, Any]

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
COLUMNS = (
    "size_bytes",
    "time_us",
    "busbw_GBps",
    "throughput_GBps",
    "ep_bandwidth_GBps",
    "ep_bandwidth_domain",
)
_USUAL = 3
"""Columns that a packed row always has; those after it are left out where they are empty."""


def read_sweep_rows(path: str | Path) -> list[Any]:
    """Read a file in either shape; entries that are no rows are scored as such."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"is not valid JSON: {error}"
        raise InputError([Problem(str(path), what, "give a list of rows")]) from None
    if isinstance(data, dict) and isinstance(data.get("sweeps"), list):
        return list(_unpacked(data["sweeps"]))
    if isinstance(data, list):
        return data
    fix = "give a JSON list with one object per row, or sweeps as validation/collectives/runs.json"
    raise InputError([Problem(str(path), "holds neither a list of rows nor packed sweeps", fix)])


def _unpacked(sweeps: Sequence[Any]) -> Iterator[Any]:
    for sweep in sweeps:
        rows = sweep.get("rows") if isinstance(sweep, Mapping) else None
        if not isinstance(rows, list):
            yield sweep
            continue
        shared = {name: sweep.get(name) for name in SHARED}
        for values in rows:
            short = isinstance(values, list) and len(values) <= len(COLUMNS)
            yield {**shared, **dict(zip(COLUMNS, values, strict=False))} if short else values


def pack_sweeps(rows: Iterable[Row]) -> str:
    """Return rows as JSON text in which every sweep states what its rows share once."""
    sweeps: dict[str, dict[str, Any]] = {}
    for row in rows:
        shared = {name: row.get(name) for name in SHARED if row.get(name) is not None}
        # The page is enough; its line differs from row to row.
        shared["source"] = str(row.get("source", "")).partition("#")[0]
        sweep = sweeps.setdefault(json.dumps(shared), {**shared, "rows": []})
        values = [row.get(name) for name in COLUMNS]
        while len(values) > _USUAL and values[-1] is None:
            values.pop()
        sweep["rows"].append(values)
    lines = ",\n".join(json.dumps(sweep, ensure_ascii=False) for sweep in sweeps.values())
    head = json.dumps({"columns": COLUMNS})[:-1]
    return f'{head}, "sweeps": [\n{lines}\n]}}\n'
