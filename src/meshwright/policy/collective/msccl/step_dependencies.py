"""Finds the fewest waits between the lanes of a rank that keep its events in order."""

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.msccl.lowering_events import MessageEvent, ThreadBlockKey
from meshwright.policy.collective.msccl.step_fusion import StepsByThreadBlock, UnlinkedStep

StepPosition = tuple[int, int]
"""A lane (by its place in the list) and a step of it, before further waits are put in."""


def sort_thread_blocks(
    lanes: StepsByThreadBlock,
) -> list[tuple[ThreadBlockKey, list[UnlinkedStep]]]:
    """Return lanes as MSCCL sorts them: by peers, then by channel."""
    return sorted(lanes.items())


def find_dependencies(
    lanes: list[tuple[ThreadBlockKey, list[UnlinkedStep]]], events: list[MessageEvent]
) -> list[list[list[StepPosition]]] | None:
    """Return what every step of every lane waits for, or nothing where they wait in a circle.

    A wait is left out where another one, or the order of the lane, already implies it.
    """
    over = _ends(lanes)
    clocks: dict[StepPosition, NDArray[np.int32]] = {}
    found: list[list[list[StepPosition]]] = [[] for _ in lanes]
    finished: dict[StepPosition, int] = {}
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


def _ends(lanes: list[tuple[ThreadBlockKey, list[UnlinkedStep]]]) -> dict[int, StepPosition]:
    """Return the step at whose end each event is over."""
    return {
        number: (lane, index)
        for lane, (_, items) in enumerate(lanes)
        for index, item in enumerate(items)
        for number in item.events
    }


def _needs(
    item: UnlinkedStep,
    events: list[MessageEvent],
    over: dict[int, StepPosition],
    here: StepPosition,
) -> set[StepPosition]:
    needs = {over[before] for number in item.events for before in events[number].depends_on}
    # What the lane did before, and what the step itself brings, needs no wait.
    return {need for need in needs if not (need[0] == here[0] and need[1] <= here[1])}
