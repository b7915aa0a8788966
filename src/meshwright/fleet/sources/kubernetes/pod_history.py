"""What is remembered of pods from one reading to the next, since the cluster forgets them.

A pod that is deleted leaves no trace; one that comes back under its name is another attempt.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from meshwright.fleet.tables import JOBS

_OPEN = ("pending", "running")


def update_history(
    found: pa.Table, before: Mapping[str, Mapping[str, Any]], seen_s: float
) -> tuple[pa.Table, dict[str, dict[str, Any]]]:
    """Number attempts on from those before, end what has gone; return rows and what to remember.

    What is remembered of a job is the newest row, the first attempt of its pod, and when it was
    seen.
    """
    now: dict[str, dict[str, Any]] = {}
    rows = list[dict[str, Any]]()
    for row in found.to_pylist():
        old = before.get(row["job"])
        first = _first(old, row)
        numbered = row | {"attempt": first + row["attempt"]}
        rows.append(numbered)
        kept = now.get(row["job"])
        if kept is None or numbered["attempt"] >= kept["row"]["attempt"]:
            now[row["job"]] = {"row": numbered, "first": first, "seen_s": seen_s}
    rows += list(_gone(before, now, seen_s))
    for job, old in before.items():
        if job not in now:  # its name may come back
            now[job] = dict(old) | {"row": old["row"] | {"state": "completed"}}
    return pa.Table.from_pylist(rows, schema=JOBS), now


def _first(old: Mapping[str, Any] | None, row: Mapping[str, Any]) -> int:
    if old is None:
        return 0
    same = old["row"]["scheduler_id"] == row["scheduler_id"]
    return int(old["first"]) if same else int(old["row"]["attempt"]) + 1


def _gone(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], seen_s: float
) -> Iterable[dict[str, Any]]:
    """End attempts whose pod was deleted: they held their GPUs when they were last seen."""
    for job, old in before.items():
        row, here = old["row"], now.get(job)
        replaced = here is not None and here["row"]["scheduler_id"] != row["scheduler_id"]
        if row["state"] in _OPEN and (here is None or replaced):
            end_s = old["seen_s"] if row["start_s"] is not None else None
            yield row | {"state": "cancelled", "reason": "its pod was deleted", "end_s": end_s,
                         "seen_s": seen_s}  # fmt: skip
