"""Score predicted collectives against published measurements, one output row per input row.

    python -m validation.collectives.score [--runs FILE] [--json]

It reads nccl-tests style rows (see `systems` for how a row becomes a cluster), predicts each with
`meshwright.predict.network`, and says why a row has no error where it has none.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from meshwright.predict.network import Op, Placement, bus_factor, collective
from meshwright.predict.network.constants import DEFAULT_NCCL
from meshwright.predict.network.fabric import kinds
from validation.collectives.rows import RUNS, Row, read_rows
from validation.collectives.systems import System, Unreadable, system

MIB = 1 << 20
_OPS: tuple[str, ...] = get_args(Op)


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One row of measurements with its prediction."""

    row: int
    """Index in the input."""
    system: str
    collective: str
    size_bytes: int | None
    fabric: str | None = None
    """The kind of link that bounds it: the network, or the links inside one unit."""
    predicted_us: float | None = None
    measured_us: float | None = None
    error: float | None = None
    """Predicted over measured, less one."""
    algorithm: str | None = None
    protocol: str | None = None
    assumed: tuple[str, ...] = ()
    """What the row did not say."""
    skipped: str | None = None
    """Why there is no error."""


def score(rows: Sequence[Row]) -> list[Scored]:
    """Return one scored row per row, in order."""
    return [_scored(index, row) for index, row in enumerate(rows)]


def measured_us(row: Row, op: Op, ranks: int) -> float | None:
    """Return the measured time, from the bus bandwidth where the row states no time."""
    if row.get("time_us"):
        return float(row["time_us"])
    if row.get("busbw_GBps"):
        return float(row["size_bytes"] * bus_factor(op, ranks) / (row["busbw_GBps"] * 1e3))
    return None


def only(row: Row) -> tuple[str, ...] | None:
    """Return the algorithms that a run was restricted to, where its row says so."""
    text = (row.get("algo") or "").lower()
    return ("ring",) if "nvls_enable=0" in text else None


def version(row: Row) -> str:
    """Return the NCCL version to predict with: the row's, else the one most runs report."""
    found = re.search(r"2\.\d+", row.get("nccl_version") or "")
    return found[0] if found else DEFAULT_NCCL


def fabric_name(place: Placement) -> str:
    """Return the kind of link that a group's collectives are bound by."""
    inside, between = kinds(place)
    return inside if place.units == 1 else between


def _scored(index: int, row: Row) -> Scored:
    plain = Scored(
        row=index,
        system=str(row.get("system")),
        collective=str(row.get("collective")),
        size_bytes=row.get("size_bytes"),
    )
    skip = _unusable(row)
    if skip is not None:
        return msgspec.structs.replace(plain, skipped=skip)
    try:
        found: System = system(row)
    except Unreadable as error:
        return msgspec.structs.replace(plain, skipped=str(error))
    op: Op = row["collective"]
    cost = collective(found.place, op, row["size_bytes"], nccl=version(row), only=only(row))
    predicted = cost.seconds * 1e6
    measured = measured_us(row, op, found.place.ranks)
    return msgspec.structs.replace(
        plain,
        fabric=fabric_name(found.place),
        predicted_us=predicted,
        measured_us=measured,
        error=None if measured is None else predicted / measured - 1,
        algorithm=cost.algorithm,
        protocol=cost.protocol,
        assumed=found.assumed,
        skipped=None if measured is not None else "neither a time nor a bus bandwidth is given",
    )


def _unusable(row: Row) -> str | None:
    if row.get("collective") not in _OPS:
        return f"{row.get('collective')} is not a collective of NCCL"
    return None if row.get("size_bytes") else "no message size is given"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one group of rows, from 1 MiB on and below."""

    rows: int
    large: int
    large_median: float | None
    small: int
    small_median: float | None
    within_25: float
    """Share of all rows within 25 %."""


def summary(scored: Iterable[Scored]) -> dict[str, dict[str, Group]]:
    """Return the errors overall, by fabric and by collective."""
    good = [row for row in scored if row.error is not None]
    by_fabric = sorted({row.fabric or "" for row in good})
    by_collective = sorted({row.collective for row in good})
    return {
        "all": {"all": grouped(good)},
        "fabric": {n: grouped([r for r in good if r.fabric == n]) for n in by_fabric},
        "collective": {n: grouped([r for r in good if r.collective == n]) for n in by_collective},
    }


def grouped(rows: Sequence[Scored]) -> Group:
    """Return the errors of some rows."""
    large = [abs(row.error or 0.0) for row in rows if (row.size_bytes or 0) >= MIB]
    small = [abs(row.error or 0.0) for row in rows if (row.size_bytes or 0) < MIB]
    both = large + small
    return Group(
        rows=len(both),
        large=len(large),
        large_median=statistics.median(large) if large else None,
        small=len(small),
        small_median=statistics.median(small) if small else None,
        within_25=sum(error <= 0.25 for error in both) / max(1, len(both)),
    )


def tables(groups: dict[str, dict[str, Group]]) -> str:
    """Write the errors as a Markdown table."""
    lines = [
        "| rows of | ≥ 1 MiB | median error | < 1 MiB | median error | within 25 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for part in groups.values():
        for name, group in part.items():
            large = "–" if group.large_median is None else f"{group.large_median:.1%}"
            small = "–" if group.small_median is None else f"{group.small_median:.1%}"
            share = f"{group.within_25:.0%}"
            lines.append(
                f"| {name} | {group.large} | {large} | {group.small} | {small} | {share} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score a file of rows and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=Path, default=RUNS, help="rows in the format of the data")
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    given = parser.parse_args(arguments)
    scored = score(read_rows(given.runs))
    groups = summary(scored)
    if given.json:
        answer = {"rows": scored, "summary": groups}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n")
        return 0
    skipped = sum(row.skipped is not None for row in scored)
    sys.stdout.write(f"{len(scored)} rows, {skipped} without an error\n\n{tables(groups)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
