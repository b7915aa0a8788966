"""`find_zero_bubble_schedule`: the zero-bubble order that suits given pass lengths and memory."""

from typing import Literal

from meshwright.policy.pipeline.action_times import PipelinePassDurations
from meshwright.policy.pipeline.rank_writer import ScheduleParams
from meshwright.policy.pipeline.schedule import PipelineSchedule
from meshwright.policy.pipeline.schedule_builder import (
    build_schedule,
    filter_by_in_flight,
    list_memory_variants,
)
from meshwright.policy.pipeline.schedule_tuner import compute_makespan, tune_schedule

PipelineShape = Literal["straight", "folded"]
"""One chunk per rank, or two with the model folded at the last rank."""


def find_zero_bubble_schedule(
    ranks: int,
    microbatches: int,
    lengths: PipelinePassDurations,
    *,
    shape: PipelineShape = "straight",
    max_in_flight: int | None = None,
) -> PipelineSchedule:
    """Return the shortest zero-bubble schedule found for passes of these lengths.

    The handmade schedules hold for passes of equal length; this tunes each of them, the zb-h kinds
    for the straight shape and the V kinds for the folded one, and keeps the best. It is a good
    order, not a proven optimum. `max_in_flight` is the most chunk-microbatches a rank may hold;
    None takes that of zb-h2 or zb-v.
    """
    if shape == "folded" and ranks > 1:
        usual = build_schedule("zb-v", ranks, microbatches)
        limit = 2 * ranks if max_in_flight is None else max_in_flight
        found = filter_by_in_flight(
            list_memory_variants(usual, ScheduleParams(ranks, microbatches, 2)), limit
        )
    else:
        limit = 2 * ranks - 1 if max_in_flight is None else max_in_flight
        found = [
            build_schedule("zb-h1", ranks, microbatches, max_in_flight=limit),
            build_schedule("zb-h2", ranks, microbatches, max_in_flight=limit),
        ]
    tuned = (tune_schedule(form, lengths, limit) for form in found)
    return min(tuned, key=lambda one: compute_makespan(one, lengths))
