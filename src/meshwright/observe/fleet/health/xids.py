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

Fault = Literal["application", "hardware", "link", "driver", "information", "unused", "unknown"]
Step = Literal["none", "watch", "drain"]
Mend = Literal["", "reset", "reboot", "replace"]


class Xid(NamedTuple):
    """One number of the catalogue."""

    code: int
    fault: Fault
    now: str
    """NVIDIA's immediate action; empty: the catalogue has none."""
    then: str
    """What NVIDIA says to do where it comes again."""
    meaning: str


class Verdict(NamedTuple):
    """What follows from one fault."""

    step: Step
    mend: Mend
    """What makes a drained node fit for work again."""


NONE: Final = Verdict("none", "")
WATCH: Final = Verdict("watch", "")
RESET: Final = Verdict("drain", "reset")
REBOOT: Final = Verdict("drain", "reboot")
REPLACE: Final = Verdict("drain", "replace")

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
_FATAL: Final = re.compile(r"(?<![-\w])fatal\b", re.IGNORECASE)

MENDED: Final = {
    "": "",
    "reset": "reset the GPUs (nvidia-smi -r) or reboot, then run dcgmi diag -r 2",
    "reboot": "reboot the node, then run dcgmi diag -r 2",
    "replace": "have the part checked or replaced, then run dcgmi diag -r 3",
}
"""What to do with a node that is out of service."""


@cache
def catalogue() -> dict[int, Xid]:
    """Return all numbers that NVIDIA has given out."""
    text = files(__package__).joinpath("xids.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    found = (
        Xid(int(row["code"]), cast(Fault, row["fault"]), row["now"], row["then"], row["meaning"])
        for row in rows
    )
    return {one.code: one for one in found}


def xid(code: int) -> Xid:
    """Return what is known of a number."""
    known = catalogue().get(code)
    return known or Xid(code, "unknown", "", "", "not in NVIDIA's catalogue")


def is_fatal(text: str) -> bool:
    """Say whether a message calls its error fatal; `non-fatal` and `Nonfatal` do not."""
    return bool(_FATAL.search(text))


def judge(code: int, text: str = "") -> Verdict:
    """Say what an Xid calls for; that of a program never calls for a drain."""
    known = xid(code)
    if code == 154:
        return next((verdict for form, verdict in _ASKED if form.search(text)), WATCH)
    if known.fault in ("application", "information"):
        return NONE
    if known.now == "WORKFLOW_NVLINK5_ERR":
        return RESET if is_fatal(text) else WATCH
    if known.now == "IGNORE" and known.fault == "driver":
        return NONE
    return _OURS.get(code) or _DRAINS.get(known.now, WATCH)


@cache
def draining() -> tuple[int, ...]:
    """Return the numbers that call for a drain whatever their text says."""
    return tuple(code for code in catalogue() if judge(code).step == "drain")
