"""Lemon nodes: those that fail again and again, beyond what chance deals out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from meshwright.fleet.health.recovery import NodeKey
from meshwright.fleet.statistics.robust import control_false_discovery, poisson_tail

MIN_INCIDENT_GAP_S: Final = 86_400.0
"""What happens to a node within a day of its last incident is the same one."""
MIN_INCIDENTS: Final = 3


def group_incidents(moments: Iterable[tuple[NodeKey, float]]) -> dict[NodeKey, list[float]]:
    """Return when each node had an incident."""
    of: dict[NodeKey, list[float]] = defaultdict(list)
    for place, time_s in sorted(moments, key=lambda one: one[1]):
        # Measured from the last event, so that one bad week is one incident.
        if not of[place] or time_s - of[place][-1] > MIN_INCIDENT_GAP_S:
            of[place].append(time_s)
        else:
            of[place][-1] = time_s
    return dict(of)


def find_lemons(of: Mapping[NodeKey, list[float]], nodes: int) -> dict[NodeKey, float]:
    """Return nodes with three incidents or more, improbably many against others, and the rate.

    A Poisson chance against the mean of the calmer 95 % of nodes (at least one incident in all),
    at 1 % false discovery over all nodes.
    """
    places = sorted(of)
    seen = np.array([len(of[place]) for place in places], dtype=np.float64)
    population = max(nodes, seen.size, 1)
    others = np.sort(np.concatenate([np.zeros(population - seen.size), seen]))
    rate = max(float(others[: max(1, int(0.95 * population))].mean()), 1.0 / population)
    chance = poisson_tail(seen, np.full(seen.size, rate))
    believed = control_false_discovery(
        np.concatenate([chance, np.ones(population - seen.size)]), 0.01
    )
    return {
        place: rate for at, place in enumerate(places) if believed[at] and seen[at] >= MIN_INCIDENTS
    }
