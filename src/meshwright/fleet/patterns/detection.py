"""Look for every pattern in a fleet, put a price on each, and rank what to change first.

An hour is told once: patterns look at jobs in the order of the registry's families, and what one
has claimed of a job the next cannot claim again. Where one pattern says why another is there, only
that one is told (`FleetPattern.explained_by`).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Floats
from meshwright.fleet.patterns.finding import OPERATOR_OWNER, UNKNOWN_OWNER, FleetFinding
from meshwright.fleet.patterns.fleet_pattern import (
    FLEET_FAMILIES,
    FLEET_PATTERNS,
    FleetDetection,
    FleetPattern,
)

MAX_EVIDENCE = 3
"""So many jobs or nodes of a finding are told of; the rest are counted."""


class PatternCase(NamedTuple):
    """One hit of a pattern, with the hours that no pattern before it had claimed."""

    pattern: FleetPattern
    detection: FleetDetection
    attributed_hours: float | None


def load_detectors() -> None:
    """Load every module with patterns in it."""
    from meshwright.fleet.patterns.detectors import (  # noqa: F401
        activity,
        checkpoints,
        hardware,
        idle,
        inputs,
        node_failures,
        peers,
        placement,
        repeats,
        requests,
        slices,
    )


def list_patterns() -> tuple[FleetPattern, ...]:
    """Every pattern, by family."""
    load_detectors()
    known = [pattern for pattern, _ in FLEET_PATTERNS.values()]
    return tuple(sorted(known, key=lambda one: FLEET_FAMILIES.index(one.family)))


def find_cases(fleet: FleetData) -> tuple[PatternCase, ...]:
    """Every hit of every pattern."""
    load_detectors()
    left = fleet.jobs.gpu_hours.copy()
    told: dict[str, set[int]] = {}
    found: list[PatternCase] = []
    for pattern in _in_turn():
        own: set[int] = set()
        for hit in FLEET_PATTERNS[pattern.name][1](fleet):
            rows = hit.jobs.tolist()
            if any(set(rows) & told.get(other, set()) for other in pattern.explained_by):
                continue
            hours = _claimed(pattern, hit, left)
            if hours is not None and hours < pattern.min_gpu_hours:
                continue
            own.update(rows)
            found.append(PatternCase(pattern, hit, hours))
        told[pattern.name] = own
    return tuple(found)


def _in_turn() -> list[FleetPattern]:
    """Patterns by family, each after those it yields to."""
    waiting = {one.name: one for one in list_patterns()}
    order: list[FleetPattern] = []
    while waiting:
        ready = [one for one in waiting.values() if not set(one.explained_by) & set(waiting)]
        assert ready, f"patterns yield to each other: {sorted(waiting)}"
        order.append(ready[0])
        del waiting[ready[0].name]
    return order


def _claimed(pattern: FleetPattern, hit: FleetDetection, left: Floats) -> float | None:
    """The hours of a hit, less those claimed before; taken from its jobs in proportion."""
    if hit.gpu_hours is None:
        return None
    if pattern.owner == OPERATOR_OWNER or not hit.jobs.size or pattern.family == "requests":
        # These are the hours of others, or of a device: no job's own are claimed.
        return hit.gpu_hours
    free = float(left[hit.jobs].sum())
    hours = min(hit.gpu_hours, free)
    if free > 0:
        left[hit.jobs] *= 1 - hours / free
    return hours


def find_inefficiencies(
    fleet: FleetData, price: Callable[[str], float | None] = lambda _: None
) -> tuple[FleetFinding, ...]:
    """What costs GPU-hours, costliest first; what is not in hours comes last.

    `price` gives the dollars for an hour of a kind of GPU, or None.
    """
    groups: dict[tuple[str, str], list[PatternCase]] = {}
    for case in find_cases(fleet):
        groups.setdefault((case.pattern.name, _owner(fleet, case)), []).append(case)
    whole = float(fleet.jobs.gpu_hours.sum())
    found = [_told(fleet, owner, own, price, whole) for (_, owner), own in groups.items()]
    return tuple(sorted(found, key=lambda one: (-(one.gpu_hours or 0.0), one.name, one.owner)))


def _owner(fleet: FleetData, case: PatternCase) -> str:
    if case.pattern.owner == OPERATOR_OWNER or not case.detection.jobs.size:
        return OPERATOR_OWNER
    return fleet.jobs.user.at(int(case.detection.jobs[0])) or UNKNOWN_OWNER


def _told(
    fleet: FleetData,
    owner: str,
    own: list[PatternCase],
    price: Callable[[str], float | None],
    whole: float,
) -> FleetFinding:
    pattern = own[0].pattern
    own.sort(key=lambda case: -(case.attributed_hours or 0.0))
    known = [case.attributed_hours for case in own if case.attributed_hours is not None]
    hours = float(sum(known)) if known else None
    lines = [line for case in own[:MAX_EVIDENCE] for line in case.detection.evidence()]
    if len(own) > MAX_EVIDENCE:
        lines.append(f"and {len(own) - MAX_EVIDENCE} more like these")
    jobs = fleet.jobs
    rows = np.unique(np.concatenate([case.detection.jobs for case in own])).tolist()
    first = own[0].detection.jobs
    team = jobs.team.at(int(first[0])) if first.size and owner != OPERATOR_OWNER else ""
    return FleetFinding(
        name=pattern.name,
        title=pattern.title,
        evidence=tuple(lines),
        remedy=own[0].detection.remedy or pattern.remedy,
        gpu_share=hours / whole if hours is not None and whole else None,
        family=pattern.family,
        gpu_hours=hours,
        dollars=_money(fleet, own, price),
        owner=owner,
        team=team,
        cases=len(own),
        jobs=tuple(dict.fromkeys(jobs.job.at(row) for row in rows)),
        users=tuple(sorted({jobs.user.at(row) for row in rows} - {""})),
        nodes=tuple(sorted({node for case in own for node in case.detection.nodes})),
        cost_basis=pattern.cost_basis,
    )


def _money(
    fleet: FleetData, own: Iterable[PatternCase], price: Callable[[str], float | None]
) -> float | None:
    """Dollars; None where an hour has no price."""
    total, some = 0.0, False
    kind_of = dict(zip(fleet.node_index.names, _node_kinds(fleet), strict=True))
    for case in own:
        if case.attributed_hours is None:
            continue
        kind = (
            fleet.jobs.gpu_kind.at(int(case.detection.jobs[0])) if case.detection.jobs.size else ""
        )
        kind = kind or next((kind_of[node] for node in case.detection.nodes if node in kind_of), "")
        each = price(kind)
        if each is None:
            return None
        total, some = total + each * case.attributed_hours, True
    return total if some else None


def _node_kinds(fleet: FleetData) -> list[str]:
    found = [""] * fleet.node_index.num_nodes
    for row, node in enumerate(fleet.node_states.node.tolist()):
        found[node] = fleet.node_states.gpu_kind.at(row) or found[node]
    return found


def finding_to_data(told: FleetFinding) -> dict[str, Any]:
    """A finding as plain data, without what only runs of one job have."""
    import msgspec

    data = msgspec.to_builtins(told)
    return {name: value for name, value in data.items() if name not in _OF_RUNS}


_OF_RUNS = ("ranks", "cost_ms_per_step", "spans", "explained_by")
