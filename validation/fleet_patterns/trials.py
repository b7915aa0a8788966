"""Fleets with every fault planted once, and how what is told compares with what is there."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from meshwright.fleet.patterns import (
    FleetData,
    PatternCase,
    build_fleet_data,
    find_cases,
    list_patterns,
)
from validation.fleet_patterns import planting_habits, planting_hardware  # noqa: F401
from validation.fleet_patterns.planting import JOB_FAULTS
from validation.fleet_patterns.sound import fill
from validation.fleet_patterns.world import BEGIN_S, MINUTE_S, MINUTES, Label, World

PLANTED_FIRST = ("queue-starved-by-fragmentation", "forgotten-drain", "reservation-unused",
                 "slow-node")  # fmt: skip
"""These need nodes that are still empty."""
SOUND_JOBS = 260


class Counted(NamedTuple):
    """Of one pattern: how often it was right."""

    true: int
    false: int
    missed: int
    costs: tuple[float, ...]
    """Told over planted hours, where those are known."""


class Trial(NamedTuple):
    """One fleet, judged."""

    jobs: int
    found: dict[str, Counted]
    wrong: tuple[str, ...]
    """Every false alarm and every miss, in words."""


def planted(seed: int, faults: Iterable[str] | None = None, sound: int = SOUND_JOBS) -> World:
    """A fleet with these faults, all where none are named, among sound jobs."""
    world = World(seed)
    wanted = list(JOB_FAULTS if faults is None else faults)
    order = [name for name in PLANTED_FIRST if name in wanted]
    rest = [name for name in wanted if name not in PLANTED_FIRST]
    world.rng.shuffle(rest)
    for name in (*order, *rest):
        JOB_FAULTS[name](world)
    fill(world, sound)
    for apply in world.later:
        apply()
    return world


def fleet_in(tables: Mapping[str, Any]) -> FleetData:
    """What detectors see of the tables of a world."""
    return build_fleet_data(tables, since_s=BEGIN_S, until_s=BEGIN_S + MINUTES * MINUTE_S)


def judge(world: World, fleet: FleetData) -> Trial:
    """Look for every pattern, and compare."""
    found = find_cases(fleet)
    counted, wrong = {}, []
    for pattern in list_patterns():
        own = [case for case in found if case.pattern.name == pattern.name]
        labels = [label for label in world.labels if label.pattern == pattern.name]
        allowed = [label for label in world.labels if pattern.name in label.also]
        hit = [label for label in labels if any(_meets(fleet, case, label) for case in own)]
        known = (*labels, *allowed)
        false = [case for case in own if not any(_meets(fleet, case, one) for one in known)]
        wrong += [f"false {pattern.name}: {'; '.join(case.detection.evidence())}" for case in false]
        wrong += [f"missed {pattern.name}: {sorted(label.jobs)[:2]} {sorted(label.nodes)}"
                  for label in labels if label not in hit]  # fmt: skip
        costs = [_ratio(fleet, own, label) for label in hit if label.hours]
        counted[pattern.name] = Counted(
            len(hit), len(false), len(labels) - len(hit), tuple(c for c in costs if c is not None)
        )
    return Trial(fleet.jobs.num_jobs, counted, tuple(wrong))


def _meets(fleet: FleetData, case: PatternCase, label: Label) -> bool:
    jobs = {fleet.jobs.job.at(int(row)) for row in case.detection.jobs}
    return bool(jobs & label.jobs) or bool(set(case.detection.nodes) & label.nodes)


def _ratio(fleet: FleetData, own: list[PatternCase], label: Label) -> float | None:
    hours = [case.attributed_hours for case in own if _meets(fleet, case, label)]
    known = [one for one in hours if one is not None]
    return sum(known) / label.hours if known and label.hours else None


def together(trials: Iterable[Trial]) -> dict[str, Counted]:
    """Add up trials."""
    total: dict[str, Counted] = {}
    for trial in trials:
        for name, one in trial.found.items():
            so_far = total.get(name, Counted(0, 0, 0, ()))
            total[name] = Counted(
                so_far.true + one.true,
                so_far.false + one.false,
                so_far.missed + one.missed,
                so_far.costs + one.costs,
            )
    return total
