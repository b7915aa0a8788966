"""Pipeline schedules: for every rank, the order of forwards, backwards and transfers.

build_schedule, build_layout_schedule    make the schedule of a kind or of a layout
verify_schedule                          is it complete, free of deadlocks, within its memory?
count_in_flight                          the activations every rank holds at most
add_transfers                            write out sends and receives
find_zero_bubble_schedule                the best order for given pass lengths and memory
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.policy.pipeline.action_times import PipelinePassDurations, compute_action_times
    from meshwright.policy.pipeline.in_flight_activations import (
        count_in_flight,
        find_activation_peaks,
    )
    from meshwright.policy.pipeline.schedule import PipelineAction, PipelineSchedule
    from meshwright.policy.pipeline.schedule_builder import build_layout_schedule, build_schedule
    from meshwright.policy.pipeline.schedule_tuner import tune_schedule
    from meshwright.policy.pipeline.text_chart import format_schedule
    from meshwright.policy.pipeline.transfers import add_transfers, batch_transfers
    from meshwright.policy.pipeline.verification import verify_schedule
    from meshwright.policy.pipeline.zero_bubble_search import find_zero_bubble_schedule

_MODULES = {
    "PipelineAction": "meshwright.policy.pipeline.schedule",
    "PipelinePassDurations": "meshwright.policy.pipeline.action_times",
    "PipelineSchedule": "meshwright.policy.pipeline.schedule",
    "find_activation_peaks": "meshwright.policy.pipeline.in_flight_activations",
    "batch_transfers": "meshwright.policy.pipeline.transfers",
    "build_schedule": "meshwright.policy.pipeline.schedule_builder",
    "format_schedule": "meshwright.policy.pipeline.text_chart",
    "build_layout_schedule": "meshwright.policy.pipeline.schedule_builder",
    "count_in_flight": "meshwright.policy.pipeline.in_flight_activations",
    "compute_action_times": "meshwright.policy.pipeline.action_times",
    "tune_schedule": "meshwright.policy.pipeline.schedule_tuner",
    "verify_schedule": "meshwright.policy.pipeline.verification",
    "add_transfers": "meshwright.policy.pipeline.transfers",
    "find_zero_bubble_schedule": "meshwright.policy.pipeline.zero_bubble_search",
}

__all__ = [
    "PipelineAction",
    "PipelinePassDurations",
    "PipelineSchedule",
    "add_transfers",
    "batch_transfers",
    "build_layout_schedule",
    "build_schedule",
    "compute_action_times",
    "count_in_flight",
    "find_activation_peaks",
    "find_zero_bubble_schedule",
    "format_schedule",
    "tune_schedule",
    "verify_schedule",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
