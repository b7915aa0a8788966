"""Fit the two constants of each kind of link, and say how they do on systems they never saw.

    python -m validation.collectives.fit [--runs FILE] [--write]

Half of the systems of each kind fit the constants, the other half is scored with them, and the
other way around. `--write` then fits all rows and renews `fabrics.toml`. Nothing but `delay_us` and
`efficiency` is fitted, and no system has a constant of its own.
"""

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import log, sqrt
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from meshwright.predict.network import fabric
from meshwright.predict.network.curve import Choice, choices, priced
from meshwright.predict.network.fabric import Correction, corrections, kinds
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.tuning import Op
from validation.collectives.rows import RUNS, Row, read_rows
from validation.collectives.score import (
    MIB,
    Scored,
    fabric_name,
    grouped,
    measured_us,
    only,
    score,
    summary,
    tables,
    version,
)
from validation.collectives.systems import system

# What a constant must save to leave NCCL's own figure, for its whole range: rows that cannot tell a
# delay (messages of gigabytes alone) then leave it at nothing.
_STAY_DELAY, _STAY_EFFICIENCY = 0.06, 0.012
# A row further off than this factor counts as this far: a fit follows the many, not the odd ones.
_CLIP = log(2.5)
_DELAYS = {"call": 40.0, "hop": 80.0, "message": 20.0}
_EFFICIENCIES = (0.5, 1.25)
By = Literal["system", "source"]
TABLE = Path(fabric.__file__).with_name("fabrics.toml")


class Sample(NamedTuple):
    """One measured row with everything about it that the constants do not change."""

    system: str
    source: str
    """The page's site, owner and repository."""
    kind: str
    place: Placement
    op: Op
    nccl: str
    nbytes: float
    seconds: float
    found: tuple[Choice, ...]
    weight: float


def samples(rows: Sequence[Row], scored: Sequence[Scored]) -> list[Sample]:
    """Return the rows that can be fitted; a system weighs the root of its number of rows."""
    usable = [(rows[item.row], item) for item in scored if item.error is not None]
    count = Counter(item.system for _, item in usable)
    result = []
    for row, item in usable:
        place, op = system(row).place, row["collective"]
        found = choices(place, op, version(row), False, only(row))
        nbytes = float(row["size_bytes"])
        # Only the last choice that starts at or below the size prices it.
        taken = [choice for choice in found if choice.start_bytes <= nbytes][-1:]
        time_us = measured_us(row, op, place.ranks)
        assert time_us is not None
        result.append(
            Sample(
                system=item.system,
                source="/".join(str(row.get("source")).split("/")[2:5]),
                kind=fabric_name(place),
                place=place,
                op=op,
                nccl=version(row),
                nbytes=nbytes,
                seconds=time_us * 1e-6,
                found=tuple(taken),
                weight=1 / sqrt(count[item.system]),
            )
        )
    return result


def predicted_s(sample: Sample, table: Mapping[str, Correction]) -> float:
    """Return the time of a sample under some constants."""
    inside, between = kinds(sample.place)
    across = table[between] if sample.place.units > 1 else None
    links = table[inside], across
    raw = priced(sample.found, sample.place, sample.op, sample.nccl, links)
    price = [part for part in raw if part[0] <= sample.nbytes][-1][1]
    return price.seconds(sample.nbytes)


def loss(group: Sequence[Sample], table: Mapping[str, Correction]) -> float:
    """Return the weighted mean of |log(predicted / measured)|, each row clipped."""
    total = sum(sample.weight for sample in group)
    off = (
        sample.weight * min(_CLIP, abs(log(predicted_s(sample, table) / sample.seconds)))
        for sample in group
    )
    return sum(off) / total


def fitted(data: Sequence[Sample], start: Mapping[str, Correction]) -> dict[str, Correction]:
    """Return the constants that fit the samples best; kinds without samples keep none."""
    table = {
        name: msgspec.structs.replace(old, delay_us=0.0, efficiency=1.0, rows=0)
        for name, old in start.items()
    }
    # Links inside a unit first: groups that span units build on them.
    for name in sorted(table, key=lambda name: table[name].per != "call"):
        group = [sample for sample in data if sample.kind == name]
        if group:
            table[name] = _best(name, group, table)
    return table


def _best(name: str, group: Sequence[Sample], table: dict[str, Correction]) -> Correction:
    """Search one kind's two constants by turns, on ever finer grids."""
    now = msgspec.structs.replace(table[name], rows=len(group))

    def cost(delay_us: float, efficiency: float) -> float:
        trial = msgspec.structs.replace(now, delay_us=delay_us, efficiency=efficiency)
        moved = _STAY_DELAY * delay_us / _DELAYS[now.per] + _STAY_EFFICIENCY * abs(efficiency - 1)
        return loss(group, {**table, name: trial}) + moved

    delay, share = 0.0, 1.0
    low, high = _EFFICIENCIES
    for turn in range(4):
        fine = 1 / 4**turn
        delays = _around(delay, _DELAYS[now.per] * fine, 0.0)
        delay = min(delays, key=lambda value, at=share: cost(value, at))  # type: ignore[misc]
        shares = _around(share, (high - low) * fine, low)
        share = min(shares, key=lambda value, at=delay: cost(at, value))  # type: ignore[misc]
    return msgspec.structs.replace(now, delay_us=round(delay, 1), efficiency=round(share, 2))


def _around(middle: float, reach: float, floor: float) -> list[float]:
    return sorted({max(floor, middle + reach * (step / 12 - 1)) for step in range(25)})


def halves(data: Iterable[Sample], by: By) -> dict[str, int]:
    """Return which half each system (or source) falls into: by turns, the longest sweeps first.

    Those of one length come in an order of no meaning.
    """
    by_kind: dict[str, Counter[str]] = {}
    for sample in data:
        by_kind.setdefault(sample.kind, Counter())[getattr(sample, by)] += 1
    sides: dict[str, int] = {}
    for found in by_kind.values():
        order = sorted(found, key=lambda name: (-found[name], _scrambled(name)))
        for index, name in enumerate(order):
            sides.setdefault(name, index % 2)
    return sides


def _scrambled(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def rescored(
    scored: Sequence[Scored], data: Sequence[Sample], table: Mapping[str, Correction]
) -> list[Scored]:
    """Return the scored rows with the predictions of other constants."""
    good = [item for item in scored if item.error is not None]
    return [
        msgspec.structs.replace(item, error=predicted_s(sample, table) / sample.seconds - 1)
        for item, sample in zip(good, data, strict=True)
    ]


def cross_validation(
    rows: Sequence[Row], start: Mapping[str, Correction], by: By = "system"
) -> dict[str, list[Scored]]:
    """Return errors on the half that was fitted and on the half that was not, both ways added."""
    scored = score(rows)
    data = samples(rows, scored)
    sides = halves(data, by)
    result: dict[str, list[Scored]] = {"fitted half": [], "held-out half": []}
    side_of = [sides[getattr(sample, by)] for sample in data]
    for side in (0, 1):
        part = [sample for sample, own in zip(data, side_of, strict=True) if own == side]
        table = fitted(part, start)
        for item, own in zip(rescored(scored, data, table), side_of, strict=True):
            seen = own == side
            result["fitted half" if seen else "held-out half"].append(item)
    return result


def as_toml(table: Mapping[str, Correction], old: str) -> str:
    """Return the text of `fabrics.toml` with new figures under its old head."""
    head = old[: old.index("\n[")].rstrip()
    likes = [block for block in old.split("\n\n") if "like = " in block]
    parts = [head]
    for name, value in table.items():
        alike = next((block for block in likes if block.startswith(f"[{name}]")), None)
        own = (
            f'[{name}]\ndelay_us = {value.delay_us}\nper = "{value.per}"\n'
            f"efficiency = {value.efficiency}\nrows = {value.rows}"
        )
        parts.append(alike.strip() if alike is not None else own)
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the cross-validated errors; renew the constants where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=Path, default=RUNS, help="rows in the format of the data")
    parser.add_argument("--write", action="store_true", help="fit all rows, write fabrics.toml")
    given = parser.parse_args(arguments)
    rows = read_rows(given.runs)
    start = corrections()
    for by in get_args(By):
        for name, found in cross_validation(rows, start, by).items():
            sys.stdout.write(f"{name}, split by {by}\n\n{tables(summary(found))}\n\n")
    data = samples(rows, score(rows))
    table = fitted(data, start)
    for kind, value in table.items():
        sys.stdout.write(
            f"{kind:14} {value.delay_us:6.1f} µs per {value.per:8} × {value.efficiency:.2f}"
            f"  ({value.rows} rows)\n"
        )
    everything = rescored(score(rows), data, table)
    large = grouped(everything).large_median or 0.0
    small = grouped(everything).small_median or 0.0
    sys.stdout.write(f"all rows: {large:.1%} from {MIB} bytes on, {small:.1%} below\n")
    if given.write:
        TABLE.write_text(as_toml(table, TABLE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
