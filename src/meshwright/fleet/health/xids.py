"""What each Xid means, who is at fault, and what NVIDIA and we say to do about it.

The numbers, and NVIDIA's immediate and follow-up actions, are those of its Xid catalogue
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, as of 2025-10-29); meanings are told
in our own words. `fault` is read off the immediate action: what restarting the program mends is
the program's.
"""

import csv
import re
from functools import cache
from importlib.resources import files
from typing import Final, Literal, NamedTuple, cast

from meshwright.fleet.sources.kernel.messages import is_fatal

FaultOrigin = Literal[
    "application", "hardware", "link", "driver", "information", "unused", "unknown"
]
AdviceAction = Literal["none", "watch", "drain"]
RepairKind = Literal["", "reset", "reboot", "replace"]


class Xid(NamedTuple):
    """One number of the catalogue."""

    code: int
    origin: FaultOrigin
    immediate_action: str
    """NVIDIA's immediate action; empty: the catalogue has none."""
    followup_action: str
    """What NVIDIA says to do where it comes again."""
    meaning: str


class FaultAdvice(NamedTuple):
    """What follows from one fault."""

    action: AdviceAction
    repair: RepairKind
    """What makes a drained node fit for work again."""


NONE: Final = FaultAdvice("none", "")
WATCH: Final = FaultAdvice("watch", "")
RESET: Final = FaultAdvice("drain", "reset")
REBOOT: Final = FaultAdvice("drain", "reboot")
REPLACE: Final = FaultAdvice("drain", "replace")

_DRAINS: Final = {
    "RESET_GPU": RESET,
    "WORKFLOW_XID_48": RESET,
    "WORKFLOW_NVLINK_ERR": RESET,
    "RESTART_BM": REBOOT,
    "CHECK_MECHANICALS": REPLACE,
}
"""Actions for which the GPU must be empty."""
_OURS: Final = {167: REBOOT, 169: RESET}
"""The catalogue names no action for these; they are the like of 79 and of 62."""
_ASKED: Final = (
    (re.compile(r"to 0x\w+ \((?:None|No action)", re.IGNORECASE), NONE),
    (re.compile(r"to 0x\w+ \(\w*\s*(?:Node )?Reboot", re.IGNORECASE), REBOOT),
    (re.compile(r"to 0x\w+ \((?:GPU Reset|Reset|Drain)", re.IGNORECASE), RESET),
)
"""What the text of Xid 154 asks for."""

REPAIR_STEPS: Final = {
    "": "",
    "reset": "reset the GPUs (nvidia-smi -r) or reboot, then run dcgmi diag -r 2",
    "reboot": "reboot the node, then run dcgmi diag -r 2",
    "replace": "have the part checked or replaced, then run dcgmi diag -r 3",
}
"""What to do with a node that is out of service."""


@cache
def load_xid_catalog() -> dict[int, Xid]:
    """Return all numbers that NVIDIA has given out."""
    text = files(__package__).joinpath("xids.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    found = (
        Xid(
            int(row["code"]),
            cast(FaultOrigin, row["fault"]),
            row["now"],
            row["then"],
            row["meaning"],
        )
        for row in rows
    )
    return {one.code: one for one in found}


def find_xid(code: int) -> Xid:
    """Return what is known of a number."""
    known = load_xid_catalog().get(code)
    return known or Xid(code, "unknown", "", "", "not in NVIDIA's catalogue")


def advise_xid(code: int, text: str = "") -> FaultAdvice:
    """Say what an Xid calls for; that of a program never calls for a drain."""
    known = find_xid(code)
    if code == 154:
        return next((verdict for form, verdict in _ASKED if form.search(text)), WATCH)
    if known.origin in ("application", "information"):
        return NONE
    if known.immediate_action == "WORKFLOW_NVLINK5_ERR":
        return RESET if is_fatal(text) else WATCH
    if known.immediate_action == "IGNORE" and known.origin == "driver":
        return NONE
    return _OURS.get(code) or _DRAINS.get(known.immediate_action, WATCH)


@cache
def list_drain_xids() -> tuple[int, ...]:
    """Return the numbers that call for a drain whatever their text says."""
    return tuple(code for code in load_xid_catalog() if advise_xid(code).action == "drain")
