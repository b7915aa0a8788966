"""Lemon nodes: those that fail again and again, beyond what chance deals out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from meshwright.observe.fleet.health.clearing import Place
from meshwright.observe.fleet.measures.robust import discoveries, poisson_tail

APART_S: Final = 86_400.0
"""What happens to a node within a day of its last incident is the same one."""
FEWEST: Final = 3


def incidents(moments: Iterable[tuple[Place, float]]) -> dict[Place, list[float]]:
    """Return when each node had an incident."""
    of: dict[Place, list[float]] = defaultdict(list)
    for place, time_s in sorted(moments, key=lambda one: one[1]):
        # Measured from the last event, so that one bad week is one incident.
        if not of[place] or time_s - of[place][-1] > APART_S:
            of[place].append(time_s)
        else:
            of[place][-1] = time_s
    return dict(of)


def lemons(of: Mapping[Place, list[float]], nodes: int) -> dict[Place, float]:
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
    believed = discoveries(np.concatenate([chance, np.ones(population - seen.size)]), 0.01)
    return {place: rate for at, place in enumerate(places) if believed[at] and seen[at] >= FEWEST}
