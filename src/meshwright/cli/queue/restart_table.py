"""`--restart-table` and `--stretch`: what a start costs each job, and how much longer all run."""

import argparse
import csv
import math
from pathlib import Path
from typing import NamedTuple

from meshwright.cli.queue.jobs import QueueWorkload, change_request
from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import check_number, raise_problems
from meshwright.spec.units import parse_number

ANY_MODEL = "*"
_COLUMNS = ("gpus", "model", "restart_s")


class RestartTable(NamedTuple):
    """What restarts cost."""

    cost_s: dict[tuple[float | None, str], float]

    def find_cost(self, gpus: float, model: str) -> float:
        """Return the cost for a job; 0 where the table has neither its model nor `*`."""
        keys = ((gpus, model), (None, model), (gpus, ANY_MODEL), (None, ANY_MODEL))
        return next((self.cost_s[key] for key in keys if key in self.cost_s), 0.0)


def read_restart_table(path: str | None) -> RestartTable:
    """Read a CSV file with the columns gpus, model and restart_s; `*` stands for all others."""
    if path is None:
        return RestartTable({})
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        rows = list(csv.DictReader(text.splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError([Problem(path, f"cannot read: {reason}")]) from None
    names = tuple((rows[0] if rows else {}).keys())
    if missing := [name for name in _COLUMNS if name not in names]:
        what = f"lacks {', '.join(missing)}"
        fix = "begin it with the line gpus,model,restart_s"
        raise InputError([Problem(path, what, fix)])
    found: dict[tuple[float | None, str], float] = {}
    problems = []
    for line, row in enumerate(rows, start=2):
        where = f"{path} line {line}"
        gpus, cost_s = _number(row["gpus"], allow_any=True), _number(row["restart_s"])
        if gpus is not None and not gpus > 0:
            what = f"{row['gpus']!r} is no number of GPUs"
            problems.append(Problem(f"{where}, column gpus", what, "write 8, or * for any"))
        if cost_s is None or not cost_s >= 0:
            what = f"{row['restart_s']!r} is no number of seconds"
            problems.append(Problem(f"{where}, column restart_s", what, "write seconds, as 7"))
            continue
        key = (gpus, (row["model"] or "").strip() or ANY_MODEL)
        if found.setdefault(key, cost_s) != cost_s:
            what = "has another cost than a line before it"
            problems.append(Problem(where, what, "keep one of them"))
    if problems:
        raise InputError(problems[:5])
    return RestartTable(found)


def apply_run_changes(args: argparse.Namespace, read: QueueWorkload) -> QueueWorkload:
    """Return the jobs with the costs and the run times that the flags ask for."""
    stretch = parse_number(args.stretch, "--stretch")
    raise_problems(check_number("--stretch", stretch, 1e-3, 1e3))
    table = read_restart_table(args.restart_table)
    if stretch == 1.0 and not table.cost_s:
        return read
    known = stretch if read.estimate_kind == "exact" else 1.0
    requests = [
        change_request(
            ask, estimate_s=ask.estimate_s * known,
            restart_cost_s=table.find_cost(ask.gpus, ask.name),
        )
        for ask in read.requests
    ]  # fmt: skip
    return read._replace(requests=requests, durations_s=[one * stretch for one in read.durations_s])


def _number(text: str | None, *, allow_any: bool = False) -> float | None:
    """Read a number, NaN where it is none; None for `*`, where that is allowed."""
    word = (text or "").strip()
    if allow_any and word in ("", ANY_MODEL):
        return None
    try:
        value = float(word)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
