"""The text of `scontrol show job` and `show node`: blocks, or lines, of `Name=value`."""

import re
from collections.abc import Iterator
from typing import Any, Final

_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w/:.\-]*)=")
_NAMES: Final = frozenset({"JobId", "NodeName"})
_TO_THE_END: Final = frozenset(
    {"Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment",
     "Reason", "OS", "Extra", "SubmitLine"}
)  # fmt: skip
"""Values that may hold blanks and `=`: at the head of a line they go to its end."""


def blocks(text: str) -> Iterator[dict[str, Any]]:
    """Give every job or node with its values; `gres` lists where its GPUs are, as (nodes, gres)."""
    block: dict[str, Any] = {}
    for line in text.splitlines():
        for key, value in _pairs(line):
            if key in _NAMES and block:
                yield block
                block = {}
            if key == "Nodes" and block:
                block.setdefault("gres", []).append([value, ""])
            elif key == "GRES" and block.get("gres"):
                block["gres"][-1][1] = value
            elif key not in block:
                block[key] = value
    if block:
        yield block


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    found = list(_KEY.finditer(line))
    one_line = bool(found) and found[0][1] in _NAMES and len(found) > 12  # scontrol -o
    place = 0
    while place < len(found):
        match = found[place]
        end = found[place + 1].start() if place + 1 < len(found) else len(line)
        if not one_line and (match[1] == "JobName" or (match[1] in _TO_THE_END and not place)):
            end, place = len(line), len(found)
        # A list of resources is a value that holds `=` itself: TRES=cpu=8,mem=2000M
        yield match[1], line[match.end() : end].strip()
        place += 1
