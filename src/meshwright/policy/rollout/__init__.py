"""Rollouts and training: who generates what with which weights, and when the trainer takes it.

    rollout_policy     where both sides lie, and how far they may drift apart
    actions            what a driver is told to do, and what those wait for who do nothing
    controller         the decisions, one after another; it knows no clock
    engine_assignment  which of several engines draws a sample
    colocated_memory   what lies on GPUs that both sides share, and what an engine may fill of one

The post-training loop carries the actions out; the simulation gives each of them a duration.
"""

from meshwright.policy.rollout.actions import (
    Action,
    DropAction,
    GenerateAction,
    IdleReason,
    MemoryPhaseAction,
    SyncAction,
    TrainAction,
)
from meshwright.policy.rollout.colocated_memory import (
    ColocatedPhase,
    MemoryRegion,
    get_engine_memory_fraction,
    list_resident_regions,
    shares_weights,
)
from meshwright.policy.rollout.controller import GroupEnd, RolloutController, RolloutProgress
from meshwright.policy.rollout.engine_assignment import AssignmentPolicy, EngineAssigner
from meshwright.policy.rollout.rollout_policy import (
    PLACEMENTS,
    STALE_POLICIES,
    Placement,
    RolloutPolicy,
    StalePolicy,
    build_rollout_policy,
)

__all__ = [
    "PLACEMENTS",
    "STALE_POLICIES",
    "Action",
    "AssignmentPolicy",
    "ColocatedPhase",
    "DropAction",
    "EngineAssigner",
    "GenerateAction",
    "GroupEnd",
    "IdleReason",
    "MemoryPhaseAction",
    "MemoryRegion",
    "Placement",
    "RolloutController",
    "RolloutPolicy",
    "RolloutProgress",
    "StalePolicy",
    "SyncAction",
    "TrainAction",
    "build_rollout_policy",
    "get_engine_memory_fraction",
    "list_resident_regions",
    "shares_weights",
]
