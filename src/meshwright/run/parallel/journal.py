"""`Journal`: what one process did together with others, in order, and from where in the program.

Ranks that do not issue the same collectives in the same order wait for each other for ever, so each
keeps a checksum per group that all members must share, and the last entries to say where they
parted. An entry costs about a microsecond and no allocation that lasts.
"""

import sys
import zlib
from collections import deque
from types import CodeType
from typing import NamedTuple

import torch

_INSIDE = ("/run/parallel/", "/torch/")
"""Code that passes calls on: the line that matters is the one before."""


class Where(NamedTuple):
    """A line of the program."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line} ({self.code.co_name})"


class Entry(NamedTuple):
    """One thing done together."""

    number: int
    """Its number within the group, counted from 1."""
    group: str
    op: str
    elements: int
    dtype: torch.dtype
    where: Where | None

    def __str__(self) -> str:
        what = f"{self.op} number {self.number} of group {self.group}, {self.elements:,} elements"
        return f"{what} of {str(self.dtype).removeprefix('torch.')}, at {self.where}"


class Journal:
    """The last collectives of a process."""

    def __init__(self, keep: int = 256) -> None:
        self.entries: deque[Entry] = deque(maxlen=keep)
        self.digests: dict[str, int] = {}
        """For each group a checksum of everything it did so far."""
        self.counts: dict[str, int] = {}

    def note(self, group: str, op: str, tensor: torch.Tensor, where: Where | None = None) -> Entry:
        """Write down that a collective is about to be issued."""
        number = self.counts.get(group, 0) + 1
        self.counts[group] = number
        mark = f"{op}:{tensor.numel()}:{tensor.dtype}".encode()
        self.digests[group] = zlib.crc32(mark, self.digests.get(group, 0))
        entry = Entry(number, group, op, tensor.numel(), tensor.dtype, where or here())
        self.entries.append(entry)
        return entry


def here() -> Where | None:
    """Return the nearest calling line that is not one of those that only pass calls on."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to it that costs no list of all frames
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _INSIDE):
            return Where(frame.f_code, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
