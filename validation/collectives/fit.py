"""Fit the two constants of each kind of link, and say how they do on what they never saw.

    python -m validation.collectives.fit [--runs FILE] [--write]

Every system, and then every source, is left out in turn and scored with constants that were fitted
to all others. `--write` fits all rows and renews `fabrics.toml`. Nothing but `delay_us` and
`efficiency` is fitted, and no system has a constant of its own.
"""

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from math import log
from pathlib import Path
from statistics import geometric_mean, median
from typing import Literal, get_args

from msgspec.structs import replace

from meshwright.predict.network import link_corrections
from meshwright.predict.network.link_corrections import (
    LinkCorrection,
    get_link_kinds,
    load_corrections,
)
from meshwright.predict.validation.collectives import (
    CollectiveErrorSummary,
    Row,
    ScoredCollective,
    read_sweep_rows,
    score_collectives,
    summarize_collectives,
    summarize_group,
)
from meshwright.predict.validation.collectives.collective_summary import MIB
from validation.collectives.pack import RUNS
from validation.collectives.samples import Sample, Table, price_s, rescored, samples

# What a constant must save to leave what is expected of it, for its whole range: rows that cannot
# tell a delay (messages of gigabytes alone) then leave it there.
_STAY_DELAY, _STAY_EFFICIENCY = 0.06, 0.012
# A row further off than this factor counts as this far: a fit follows the many, not the odd ones.
_CLIP = log(2.5)
_DELAYS = {"call": 40.0, "hop": 80.0, "message": 20.0}
_EFFICIENCIES = (0.04, 1.25)
_LEAST_US = 0.5
"""Delays below this are alike."""
By = Literal["system", "source"]
TABLE = Path(link_corrections.__file__).with_name("fabrics.toml")


def loss(group: Sequence[Sample], table: Table) -> float:
    """Return the weighted mean of |log(predicted / measured)|, each row clipped."""
    total = sum(sample.weight for sample in group)
    off = (
        sample.weight * min(_CLIP, abs(log(price_s(sample, table) / sample.seconds)))
        for sample in group
    )
    return sum(off) / total


class Fitter:
    """Fits constants to any part of the samples, and remembers what it has fitted before."""

    def __init__(self, start: Table) -> None:
        self.start = start
        self.known: dict[tuple[object, ...], LinkCorrection] = {}

    def fitted(self, data: Sequence[Sample]) -> dict[str, LinkCorrection]:
        """Return the constants that fit the samples best.

        Each kind is fitted twice: first from NCCL's own figures, then from what the other kinds
        make likely, so that a kind with few rows ends near its kin. A network without any rows
        takes its kin's figures as they are.
        """
        table = {
            name: replace(old, delay_us=0.0, efficiency=1.0, rows=0)
            for name, old in self.start.items()
        }
        groups = {name: [sample for sample in data if sample.kind == name] for name in table}
        # Links inside a unit first: groups that span units build on them.
        order = sorted(table, key=lambda name: table[name].per != "call")
        for name in order:
            if groups[name]:
                table[name] = self._best(name, groups[name], table, 0.0)
        first = dict(table)
        for name in order:
            delay_us = _expected_us(name, first)
            if groups[name]:
                table[name] = self._best(name, groups[name], table, delay_us)
            elif table[name].per != "call":
                table[name] = _unseen(name, first)
        return table

    def _best(
        self, name: str, group: Sequence[Sample], table: Table, expected_us: float
    ) -> LinkCorrection:
        used = {get_link_kinds(sample.place)[0] for sample in group} - {name}
        beneath = tuple((kind, table[kind].delay_us, table[kind].efficiency) for kind in used)
        key = name, expected_us, tuple(sample.number for sample in group), beneath
        if key not in self.known:
            self.known[key] = _best(name, group, table, expected_us)
        return self.known[key]


def _kin(name: str, table: Table) -> list[LinkCorrection]:
    """Return the other kinds with rows: fast links for a fast link, networks for a network."""
    fast = table[name].per == "call"
    found = (value for other, value in table.items() if other != name and value.rows)
    return [value for value in found if (value.per == "call") == fast]


def _expected_us(name: str, table: Table) -> float:
    """Return the delay that kinds which delay in the same place make likely, in whole µs."""
    alike = [value.delay_us for value in _kin(name, table) if value.per == table[name].per]
    return float(round(geometric_mean(max(_LEAST_US, delay) for delay in alike))) if alike else 0.0


def _unseen(name: str, table: Table) -> LinkCorrection:
    """Return what is to be expected of a network that no row is about."""
    kin = _kin(name, table)
    hops = [max(_LEAST_US, value.delay_us) for value in kin if value.per == "hop"]
    if not hops:
        return table[name]
    share = median(value.efficiency for value in kin)
    return replace(table[name], per="hop", delay_us=geometric_mean(hops), efficiency=share)


def _best(name: str, group: Sequence[Sample], table: Table, expected_us: float) -> LinkCorrection:
    """Search one kind's two constants by turns, on ever finer grids."""
    now = replace(table[name], rows=len(group))

    def cost(delay_us: float, efficiency: float) -> float:
        trial = replace(now, delay_us=delay_us, efficiency=efficiency)
        moved = _STAY_DELAY * abs(delay_us - expected_us) / _DELAYS[now.per]
        moved += _STAY_EFFICIENCY * abs(efficiency - 1)
        return loss(group, {**table, name: trial}) + moved

    delay, share = expected_us, 1.0
    low, high = _EFFICIENCIES
    for turn in range(4):
        fine = 1 / 4**turn
        delays = _around(delay, _DELAYS[now.per] * fine, 0.0)
        delay = min(delays, key=lambda value, at=share: cost(value, at))  # type: ignore[misc]
        shares = _around(share, (high - low) * fine, low)
        share = min(shares, key=lambda value, at=delay: cost(at, value))  # type: ignore[misc]
    return replace(now, delay_us=round(delay, 1), efficiency=round(share, 2))


def _around(middle: float, reach: float, floor: float) -> list[float]:
    return sorted({max(floor, middle + reach * (step / 12 - 1)) for step in range(25)})


def held_out(
    rows: Sequence[Row], start: Table, by: By, parts: int | None = None
) -> list[ScoredCollective]:
    """Return errors on systems (or sources) by constants that never saw them.

    Each is left out alone, or with others in one of so many parts.
    """
    data = samples(rows, score_collectives(rows))
    fitter = Fitter(start)
    part_of = _parts(data, by, parts)
    result = []
    for part in sorted(set(part_of.values())):
        seen = [sample for sample in data if part_of[getattr(sample, by)] != part]
        table = fitter.fitted(seen)
        unseen = (sample for sample in data if part_of[getattr(sample, by)] == part)
        result += [rescored(sample, table) for sample in unseen]
    return result


def _parts(data: Iterable[Sample], by: By, parts: int | None) -> dict[str, int]:
    """Return the part of each system (or source): dealt out by turns, the longest sweeps first.

    Those of one length come in an order of no meaning.
    """
    by_kind: dict[str, Counter[str]] = {}
    for sample in data:
        by_kind.setdefault(sample.kind, Counter())[getattr(sample, by)] += 1
    dealt: dict[str, int] = {}
    for found in by_kind.values():
        order = sorted(found, key=lambda name: (-found[name], _scrambled(name)))
        for index, name in enumerate(order):
            dealt.setdefault(name, len(dealt) if parts is None else index % parts)
    return dealt


def _scrambled(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def as_toml(table: Table, old: str) -> str:
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


def markdown(found: CollectiveErrorSummary) -> str:
    """Write errors as a table."""
    lines = [
        "| rows of | ≥ 1 MiB | median error | < 1 MiB | median error | within 25 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, group in {"all": found.overall, **found.by_fabric, **found.by_collective}.items():
        large = "–" if group.large_median is None else f"{group.large_median:.1%}"
        small = "–" if group.small_median is None else f"{group.small_median:.1%}"
        counts = f"| {name} | {group.large} | {large} | {group.small} | {small}"
        lines.append(f"{counts} | {group.within_25:.0%} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors on what was left out; renew the constants where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=Path, default=RUNS, help="rows in the format of the data")
    parser.add_argument("--write", action="store_true", help="fit all rows, write fabrics.toml")
    given = parser.parse_args(arguments)
    rows = read_sweep_rows(given.runs)
    start = load_corrections()
    data = samples(rows, score_collectives(rows))
    table = Fitter(start).fitted(data)
    if given.write:
        TABLE.write_text(as_toml(table, TABLE.read_text(encoding="utf-8")), encoding="utf-8")
    for kind, value in table.items():
        sys.stdout.write(
            f"{kind:14} {value.delay_us:6.1f} µs per {value.per:8} × {value.efficiency:.2f}"
            f"  ({value.rows} rows)\n"
        )
    everything = [rescored(sample, table) for sample in data]
    large = summarize_group(everything).large_median or 0.0
    small = summarize_group(everything).small_median or 0.0
    sys.stdout.write(f"all rows: {large:.1%} from {MIB} bytes on, {small:.1%} below\n")
    for by in get_args(By):
        found = summarize_collectives(held_out(rows, start, by))
        sys.stdout.write(f"\neach {by} left out in turn\n\n{markdown(found)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
