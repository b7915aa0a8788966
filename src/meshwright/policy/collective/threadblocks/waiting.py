"""Finds the fewest waits between the lanes of a rank that keep its events in order."""

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.threadblocks.events import Event, LaneKey
from meshwright.policy.collective.threadblocks.fusing import Item, Lanes

At = tuple[int, int]
"""A lane (by its place in the list) and a step of it, before further waits are put in."""


def in_order(lanes: Lanes) -> list[tuple[LaneKey, list[Item]]]:
    """Return lanes as MSCCL sorts them: by peers, then by channel."""
    return sorted(lanes.items())


def waits(
    lanes: list[tuple[LaneKey, list[Item]]], events: list[Event]
) -> list[list[list[At]]] | None:
    """Return what every step of every lane waits for, or nothing where they wait in a circle.

    A wait is left out where another one, or the order of the lane, already implies it.
    """
    over = _ends(lanes)
    clocks: dict[At, NDArray[np.int32]] = {}
    found: list[list[list[At]]] = [[] for _ in lanes]
    finished: dict[At, int] = {}
    turn = 0
    moving = True
    while moving:
        moving = False
        for lane, (_, items) in enumerate(lanes):
            while len(found[lane]) < len(items):
                here = lane, len(found[lane])
                needs = _needs(items[here[1]], events, over, here)
                if any(need not in clocks for need in needs):
                    break
                clock = np.full(len(lanes), -1, dtype=np.int32)
                if here[1]:
                    clock = clocks[lane, here[1] - 1].copy()
                kept = []
                for need in sorted(needs, key=lambda need: -finished[need]):
                    if clock[need[0]] < need[1]:
                        kept.append(need)
                        np.maximum(clock, clocks[need], out=clock)
                clock[lane] = here[1]
                clocks[here], finished[here] = clock, turn
                found[lane].append(sorted(kept))
                turn += 1
                moving = True
    if any(len(done) < len(items) for done, (_, items) in zip(found, lanes, strict=True)):
        return None
    return found


def _ends(lanes: list[tuple[LaneKey, list[Item]]]) -> dict[int, At]:
    """Return the step at whose end each event is over."""
    return {
        number: (lane, index)
        for lane, (_, items) in enumerate(lanes)
        for index, item in enumerate(items)
        for number in item.events
    }


def _needs(item: Item, events: list[Event], over: dict[int, At], here: At) -> set[At]:
    needs = {over[before] for number in item.events for before in events[number].after}
    # What the lane did before, and what the step itself brings, needs no wait.
    return {need for need in needs if not (need[0] == here[0] and need[1] <= here[1])}
