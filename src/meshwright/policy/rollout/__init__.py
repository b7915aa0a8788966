"""Rollouts and training: who generates what with which weights, and when the trainer takes it.

    arrangement  where both sides lie, and how far they may drift apart
    actions      what a driver is told to do, and what those wait for who do nothing
    controller   the decisions, one after another; it knows no clock

The post-training loop carries the actions out; the simulation gives each of them a duration.
"""

from meshwright.policy.rollout.actions import (
    Action,
    Drop,
    Generate,
    Phase,
    Sync,
    Train,
    Wait,
)
from meshwright.policy.rollout.arrangement import (
    PLACEMENTS,
    TOO_OLD,
    Arrangement,
    Placement,
    TooOld,
    arranged,
)
from meshwright.policy.rollout.controller import Controller, Ending, Progress

__all__ = [
    "PLACEMENTS",
    "TOO_OLD",
    "Action",
    "Arrangement",
    "Controller",
    "Drop",
    "Ending",
    "Generate",
    "Phase",
    "Placement",
    "Progress",
    "Sync",
    "TooOld",
    "Train",
    "Wait",
    "arranged",
]
