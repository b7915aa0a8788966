"""How well the passes of a pipeline agree with the order that each kind of schedule gives them."""

from functools import lru_cache
from typing import TYPE_CHECKING, get_args

import numpy as np

from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.spec.layout import ScheduleKind

SchedulePass = tuple[str, int, int]
"""What is done (`F`, `B`, `I`, `W`), with which chunk, for which microbatch."""
MAX_STAGES, MAX_PASSES = 512, 1 << 16
"""Larger schedules are not compared: no pipeline is so large, and some kinds would take minutes."""


def score_schedules(
    listed: list[dict[int, list[SchedulePass]]], stages: int
) -> list[tuple[float, str]]:
    """How well every kind agrees, best first."""
    from meshwright.spec.layout import ScheduleKind

    passes = [one for run in listed for own in run.values() for one in own]
    microbatches = 1 + max(number for _, _, number in passes)
    chunks = 1 + max(chunk for _, chunk, _ in passes)
    scores = []
    for kind in get_args(ScheduleKind):
        best = 0.0
        for held in {1, 2, max(1, chunks // stages)}:
            lanes = build_schedule_orders(kind, stages, microbatches, held)
            if lanes:
                best = max(best, float(np.mean([_agreement(run, lanes) for run in listed])))
        scores.append((best, str(kind)))
    return sorted(scores, key=lambda item: -item[0])


@lru_cache(maxsize=64)
def build_schedule_orders(
    kind: "ScheduleKind", stages: int, microbatches: int, held: int
) -> tuple[tuple[SchedulePass, ...], ...]:
    """The order that a kind of schedule gives each stage; none where it has no such schedule."""
    from meshwright.policy.pipeline import build_schedule

    if stages > MAX_STAGES or stages * microbatches > MAX_PASSES:
        return ()
    try:
        schedule = build_schedule(kind, stages, microbatches, virtual_stages=held)
    except InputError:
        return ()
    return tuple(
        tuple((one.op, one.chunk, one.microbatch) for one in lane) for lane in schedule.actions
    )


def _agreement(
    run: dict[int, list[SchedulePass]], lanes: tuple[tuple[SchedulePass, ...], ...]
) -> float:
    """Part of the passes that stand at the same place in both orders."""
    same = total = 0
    for stage, own in run.items():
        same += sum(a == b for a, b in zip(own, lanes[stage], strict=False))
        total += max(len(own), len(lanes[stage]))
    return same / total if total else 0.0
