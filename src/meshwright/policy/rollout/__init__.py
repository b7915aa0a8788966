"""Rollouts and training: who generates what with which weights, and when the trainer takes it.

    arrangement  where both sides lie, and how far they may drift apart
    actions      what a driver is told to do, and what those wait for who do nothing
    controller   the decisions, one after another; it knows no clock
    dealing      which of several engines draws a sample
    memory       what lies on GPUs that both sides share, and what an engine may fill of one

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
from meshwright.policy.rollout.dealing import Dealer, Dealing
from meshwright.policy.rollout.memory import Doing, Part, engine_share, held, lends_weights

__all__ = [
    "PLACEMENTS",
    "TOO_OLD",
    "Action",
    "Arrangement",
    "Controller",
    "Dealer",
    "Dealing",
    "Doing",
    "Drop",
    "Ending",
    "Generate",
    "Part",
    "Phase",
    "Placement",
    "Progress",
    "Sync",
    "TooOld",
    "Train",
    "Wait",
    "arranged",
    "engine_share",
    "held",
    "lends_weights",
]
