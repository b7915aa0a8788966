"""Look for every pattern in a fleet, put a price on each, and rank what to change first.

An hour is told once: patterns look at jobs in the order of the registry's families, and what one
has claimed of a job the next cannot claim again. Where one pattern says why another is there, only
that one is told (`Pattern.yields_to`).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.fleet.patterns.arrays import Floats
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.registry import FAMILIES, PATTERNS, Hit, Pattern
from meshwright.observe.fleet.patterns.told import OPERATORS, UNKNOWN, Told

MOST_EVIDENCE = 3
"""So many jobs or nodes of a finding are told of; the rest are counted."""


class Case(NamedTuple):
    """One hit of a pattern, with the hours that no pattern before it had claimed."""

    pattern: Pattern
    hit: Hit
    hours: float | None


def detectors() -> None:
    """Load every module with patterns in it."""
    from meshwright.observe.fleet.patterns import (  # noqa: F401
        activity,
        checkpoints,
        faults,
        hardware,
        idle,
        inputs,
        peers,
        placement,
        repeats,
        requests,
        slices,
    )


def patterns() -> tuple[Pattern, ...]:
    """Every pattern, by family."""
    detectors()
    known = [pattern for pattern, _ in PATTERNS.values()]
    return tuple(sorted(known, key=lambda one: FAMILIES.index(one.family)))


def cases(fleet: Fleet) -> tuple[Case, ...]:
    """Every hit of every pattern."""
    detectors()
    left = fleet.jobs.hours.copy()
    told: dict[str, set[int]] = {}
    found: list[Case] = []
    for pattern in _in_turn():
        own: set[int] = set()
        for hit in PATTERNS[pattern.name][1](fleet):
            rows = hit.jobs.tolist()
            if any(set(rows) & told.get(other, set()) for other in pattern.yields_to):
                continue
            hours = _claimed(pattern, hit, left)
            if hours is not None and hours < pattern.least_hours:
                continue
            own.update(rows)
            found.append(Case(pattern, hit, hours))
        told[pattern.name] = own
    return tuple(found)


def _in_turn() -> list[Pattern]:
    """Patterns by family, each after those it yields to."""
    waiting = {one.name: one for one in patterns()}
    order: list[Pattern] = []
    while waiting:
        ready = [one for one in waiting.values() if not set(one.yields_to) & set(waiting)]
        assert ready, f"patterns yield to each other: {sorted(waiting)}"
        order.append(ready[0])
        del waiting[ready[0].name]
    return order


def _claimed(pattern: Pattern, hit: Hit, left: Floats) -> float | None:
    """The hours of a hit, less those claimed before; taken from its jobs in proportion."""
    if hit.hours is None:
        return None
    if pattern.owner == OPERATORS or not hit.jobs.size or pattern.family == "requests":
        # These are the hours of others, or of a device: no job's own are claimed.
        return hit.hours
    free = float(left[hit.jobs].sum())
    hours = min(hit.hours, free)
    if free > 0:
        left[hit.jobs] *= 1 - hours / free
    return hours


def find(fleet: Fleet, price: Callable[[str], float | None] = lambda _: None) -> tuple[Told, ...]:
    """What costs GPU-hours, costliest first; what is not in hours comes last.

    `price` gives the dollars for an hour of a kind of GPU, or None.
    """
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases(fleet):
        groups.setdefault((case.pattern.name, _owner(fleet, case)), []).append(case)
    whole = float(fleet.jobs.hours.sum())
    found = [_told(fleet, owner, own, price, whole) for (_, owner), own in groups.items()]
    return tuple(sorted(found, key=lambda one: (-(one.gpu_hours or 0.0), one.name, one.owner)))


def _owner(fleet: Fleet, case: Case) -> str:
    if case.pattern.owner == OPERATORS or not case.hit.jobs.size:
        return OPERATORS
    return fleet.jobs.user.at(int(case.hit.jobs[0])) or UNKNOWN


def _told(
    fleet: Fleet, owner: str, own: list[Case], price: Callable[[str], float | None], whole: float
) -> Told:
    pattern = own[0].pattern
    own.sort(key=lambda case: -(case.hours or 0.0))
    known = [case.hours for case in own if case.hours is not None]
    hours = float(sum(known)) if known else None
    lines = [line for case in own[:MOST_EVIDENCE] for line in case.hit.tell()]
    if len(own) > MOST_EVIDENCE:
        lines.append(f"and {len(own) - MOST_EVIDENCE} more like these")
    jobs = fleet.jobs
    rows = np.unique(np.concatenate([case.hit.jobs for case in own])).tolist()
    first = own[0].hit.jobs
    team = jobs.team.at(int(first[0])) if first.size and owner != OPERATORS else ""
    return Told(
        name=pattern.name,
        title=pattern.title,
        evidence=tuple(lines),
        remedy=own[0].hit.remedy or pattern.remedy,
        gpu_share=hours / whole if hours is not None and whole else None,
        family=pattern.family,
        gpu_hours=hours,
        money=_money(fleet, own, price),
        owner=owner,
        team=team,
        cases=len(own),
        jobs=tuple(dict.fromkeys(jobs.job.at(row) for row in rows)),
        users=tuple(sorted({jobs.user.at(row) for row in rows} - {""})),
        nodes=tuple(sorted({node for case in own for node in case.hit.nodes})),
        cost=pattern.cost,
    )


def _money(fleet: Fleet, own: Iterable[Case], price: Callable[[str], float | None]) -> float | None:
    """Dollars; None where an hour has no price."""
    total, some = 0.0, False
    kind_of = dict(zip(fleet.places.names, _node_kinds(fleet), strict=True))
    for case in own:
        if case.hours is None:
            continue
        kind = fleet.jobs.gpu_kind.at(int(case.hit.jobs[0])) if case.hit.jobs.size else ""
        kind = kind or next((kind_of[node] for node in case.hit.nodes if node in kind_of), "")
        each = price(kind)
        if each is None:
            return None
        total, some = total + each * case.hours, True
    return total if some else None


def _node_kinds(fleet: Fleet) -> list[str]:
    found = [""] * fleet.places.number
    for row, node in enumerate(fleet.standing.node.tolist()):
        found[node] = fleet.standing.kind.at(row) or found[node]
    return found


def plain(told: Told) -> dict[str, Any]:
    """A finding as plain data, without what only runs of one job have."""
    import msgspec

    data = msgspec.to_builtins(told)
    return {name: value for name, value in data.items() if name not in _OF_RUNS}


_OF_RUNS = ("ranks", "cost_ms_per_step", "spans", "follows")
