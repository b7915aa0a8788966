"""Pipeline schedules: for every rank, the order of forwards, backwards and transfers.

build, for_layout    make the schedule of a kind or of a layout
verify               is it complete, free of deadlocks, within its memory?
in_flight            the activations every rank holds at most
with_transfers       write out sends and receives
zero_bubble          the best order for given pass lengths and memory
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.policy.pipeline.activations import activation_peaks, in_flight
    from meshwright.policy.pipeline.automatic import zero_bubble
    from meshwright.policy.pipeline.building import build, for_layout
    from meshwright.policy.pipeline.drawing import draw
    from meshwright.policy.pipeline.earliest import Lengths, place
    from meshwright.policy.pipeline.schedule import Action, Schedule
    from meshwright.policy.pipeline.soundness import verify
    from meshwright.policy.pipeline.transfers import batch_transfers, with_transfers
    from meshwright.policy.pipeline.tuning import tune

_HOMES = {
    "Action": "meshwright.policy.pipeline.schedule",
    "Lengths": "meshwright.policy.pipeline.earliest",
    "Schedule": "meshwright.policy.pipeline.schedule",
    "activation_peaks": "meshwright.policy.pipeline.activations",
    "batch_transfers": "meshwright.policy.pipeline.transfers",
    "build": "meshwright.policy.pipeline.building",
    "draw": "meshwright.policy.pipeline.drawing",
    "for_layout": "meshwright.policy.pipeline.building",
    "in_flight": "meshwright.policy.pipeline.activations",
    "place": "meshwright.policy.pipeline.earliest",
    "tune": "meshwright.policy.pipeline.tuning",
    "verify": "meshwright.policy.pipeline.soundness",
    "with_transfers": "meshwright.policy.pipeline.transfers",
    "zero_bubble": "meshwright.policy.pipeline.automatic",
}

__all__ = [
    "Action",
    "Lengths",
    "Schedule",
    "activation_peaks",
    "batch_transfers",
    "build",
    "draw",
    "for_layout",
    "in_flight",
    "place",
    "tune",
    "verify",
    "with_transfers",
    "zero_bubble",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
