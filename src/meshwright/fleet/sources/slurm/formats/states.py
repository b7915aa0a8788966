"""Slurm's words for how jobs and nodes stand, in the words of the shared tables."""

from collections.abc import Iterable
from typing import Final

JOB_STATES: Final = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUSPENDED": "running",  # its nodes are still its own
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "FAILED": "failed",
    "TIMEOUT": "timeout",
    "NODE_FAIL": "node_fail",
    "PREEMPTED": "preempted",
    "BOOT_FAIL": "node_fail",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "out_of_memory",
}
"""States of which a job has exactly one."""

_FLAGS: Final = {
    "REQUEUED": "requeued",
    "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "failed",
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
    "REVOKED": "cancelled",
    "CONFIGURING": "running",
    "COMPLETING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "STOPPED": "running",
    "POWER_UP_NODE": "running",
    "EXPEDITING": "running",
    "UPDATE_DB": "running",
}
"""What may be told in place of those or beside them."""

_SHORT: Final = {
    "PD": "PENDING", "R": "RUNNING", "S": "SUSPENDED", "CD": "COMPLETED", "CA": "CANCELLED",
    "F": "FAILED", "TO": "TIMEOUT", "NF": "NODE_FAIL", "PR": "PREEMPTED", "BF": "BOOT_FAIL",
    "DL": "DEADLINE", "OOM": "OUT_OF_MEMORY", "RQ": "REQUEUED", "CG": "COMPLETING",
    "CF": "CONFIGURING",
}  # fmt: skip

FINISHED_STATES: Final = frozenset(
    {"completed", "failed", "cancelled", "timeout", "out_of_memory", "node_fail", "preempted",
     "requeued"}
)  # fmt: skip


def parse_job_state(told: str | Iterable[str]) -> str:
    """Return the state of a job from `CANCELLED by 0`, or from a list of state and flags."""
    words = (
        told.replace("+", " ").replace(",", " ").split() if isinstance(told, str) else list(told)
    )
    if "by" in words:  # the rest is who cancelled it
        words = words[: words.index("by")]
    words = [_SHORT.get(word.upper(), word.upper()) for word in words]
    for names in (JOB_STATES, _FLAGS):
        for word in words:
            if word in names:
                return names[word]
    return "unknown"


_NODE_DOWN: Final = frozenset(
    {"DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN",
     "POWERING_UP", "POWER_UP", "REBOOT_ISSUED", "REBOOT", "INVALID_REG", "INVAL", "FUTURE",
     "NO_RESPOND"}
)  # fmt: skip
_NODE_DRAIN: Final = frozenset(
    {"DRAIN", "DRAINED", "DRAINING", "DRNG", "FAILING", "MAINT", "REBOOT_REQUESTED"}
)
_NODE_RESERVED: Final = frozenset({"RESERVED", "RESV"})
_NODE_UP: Final = frozenset(
    {"IDLE", "ALLOCATED", "ALLOC", "MIXED", "MIX", "COMPLETING", "COMP", "PLANNED", "BLOCKED",
     "CLOUD", "DYNAMIC_NORM", "EXTERNAL"}
)  # fmt: skip
_MARKS: Final = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "%": "POWERING_DOWN",
                 "!": "POWERING_DOWN", "#": "POWERING_UP", "@": "REBOOT_ISSUED",
                 "^": "REBOOT_ISSUED", "$": "MAINT", "-": "PLANNED"}  # fmt: skip
"""What sinfo puts behind a state."""


def parse_node_state(told: str | Iterable[str]) -> str:
    """Return the state of a node from `IDLE+DRAIN`, `mixed*`, or a list of state and flags.

    A node that is down is down whether or not it was drained before; one that still runs a job
    while it is drained is draining.
    """
    words: list[str] = []
    for word in told.replace("+", " ").replace(",", " ").split() if isinstance(told, str) else told:
        bare = word.rstrip("*~%!#@^$-")
        words.append(bare.upper())
        words += [_MARKS[mark] for mark in word[len(bare) :]]
    for known, state in (
        (_NODE_DOWN, "down"),
        (_NODE_DRAIN, "draining"),
        (_NODE_RESERVED, "reserved"),
        (_NODE_UP, "up"),
    ):
        if any(word in known for word in words):
            return state
    return "unknown"
