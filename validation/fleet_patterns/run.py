"""Measure how well patterns of a fleet are found, and keep it; `page` puts it into the docs.

    python -m validation.fleet_patterns.run [--fleets 20] [--detail]

Detectors were written while looking at fleets of the seeds below `FIRST_SEED`; what is kept is
judged on others. `--detail` tells every trial that went wrong.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from meshwright.fleet.patterns import list_patterns
from validation.fleet_patterns.bounds import BOUNDS, Tally, tallied
from validation.fleet_patterns.poorer import POORER
from validation.fleet_patterns.trials import Counted, Trial, fleet_in, judge, planted, together

RESULT = Path(__file__).parent / "result.json"
FIRST_SEED = 3200
"""Seeds below were for developing."""
FIRST_SOUND_SEED = 7200


class Row(msgspec.Struct, frozen=True):
    """One pattern."""

    name: str
    true: int
    false: int
    missed: int
    least: float | None
    """Told over planted hours: the least, the median and the most."""
    median: float | None
    most: float | None
    sound_false: int
    """How often it was told of fleets without a fault."""


class Against(msgspec.Struct, frozen=True):
    """A statistic and a fixed bound on the same fleets."""

    pattern: str
    rule: str
    true: int
    false: int
    missed: int


class Less(msgspec.Struct, frozen=True):
    """The same fleets, seen by a poorer monitor."""

    what: str
    true: int
    false: int
    missed: int
    patterns: int
    """Patterns that are found in half of the fleets or more."""


class Result(msgspec.Struct, frozen=True):
    """Everything measured."""

    fleets: int
    jobs: int
    sound_fleets: int
    sound_jobs: int
    rows: tuple[Row, ...]
    bounds: tuple[Against, ...]
    poorer: tuple[Less, ...]


def read_result() -> Result:
    """The last measurement."""
    return msgspec.json.decode(RESULT.read_bytes(), type=Result)


def measured(fleets: int, sound: int, detail: bool = False) -> Result:
    """Plant, look, compare."""
    trials, tallies = [], {bound.pattern: Tally(0, 0, 0) for bound in BOUNDS}
    poorer: dict[str, list[Trial]] = {name: [] for name in POORER}
    for seed in range(FIRST_SEED, FIRST_SEED + fleets):
        world = planted(seed)
        tables = world.tables()
        fleet = fleet_in(tables)
        trials.append(judge(world, fleet))
        for name, less in POORER.items():
            poorer[name].append(judge(world, fleet_in(less(tables))))
        for bound in BOUNDS:
            one, so_far = tallied(bound, fleet, world), tallies[bound.pattern]
            tallies[bound.pattern] = Tally(*(a + b for a, b in zip(one, so_far, strict=True)))
        if detail:
            _say(seed, trials[-1].wrong)
    calm = []
    for seed in range(FIRST_SOUND_SEED, FIRST_SOUND_SEED + sound):
        world = planted(seed, faults=(), sound=400)
        calm.append(judge(world, fleet_in(world.tables())))
        if detail:
            _say(seed, calm[-1].wrong)
    counted, quiet = together(trials), together(calm)
    return Result(
        fleets,
        sum(trial.jobs for trial in trials),
        sound,
        sum(trial.jobs for trial in calm),
        tuple(_row(one.name, counted[one.name], quiet) for one in list_patterns()),
        tuple(Against(bound.pattern, bound.rule, *tallies[bound.pattern]) for bound in BOUNDS),
        tuple(_less(name, own) for name, own in poorer.items()),
    )


def _less(name: str, trials: list[Trial]) -> Less:
    found = together(trials).values()
    return Less(
        name,
        sum(one.true for one in found),
        sum(one.false for one in found),
        sum(one.missed for one in found),
        sum(one.true >= one.missed for one in found),
    )


def _say(seed: int, wrong: Iterable[str]) -> None:
    sys.stdout.write("\n  ".join([f"fleet {seed}", *wrong]) + "\n")
    sys.stdout.flush()


def _row(name: str, one: Counted, quiet: dict[str, Counted]) -> Row:
    costs = np.array(one.costs)
    false = quiet[name].false if name in quiet else 0
    if not costs.size:
        return Row(name, one.true, one.false, one.missed, None, None, None, false)
    least, median, most = (
        round(float(value), 3) for value in (costs.min(), np.median(costs), costs.max())
    )
    return Row(name, one.true, one.false, one.missed, least, median, most, false)


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=20)
    parser.add_argument("--sound", type=int, default=10)
    parser.add_argument("--detail", action="store_true")
    args = parser.parse_args()
    result = measured(args.fleets, args.sound, args.detail)
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    for row in result.rows:
        told = row.true + row.false
        precision = f"{row.true / told:.0%}" if told else "-"
        there = row.true + row.missed
        recall = f"{row.true / there:.0%}" if there else "-"
        sys.stdout.write(f"{row.name:36} precision {precision:>5} recall {recall:>5} of {there}\n")


if __name__ == "__main__":
    main()
