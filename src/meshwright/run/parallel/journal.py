"""`Journal`: what one process did together with others, in order, and from where in the program.

Ranks that do not issue the same collectives in the same order wait for each other for ever, so each
keeps a checksum per group that all members must share, and the last entries to say where they
parted. It also knows what the process waits in now, which the alarm reads from another thread.
"""

import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.parallel.recorder import Recorder

_INSIDE = ("/meshwright/run/parallel/", "/checkpoint/peers.py", "/torch/", "/threading.py")
"""Code that passes calls on: the line that matters is the one before."""
BOARD_BYTES = 1024
_BOARD = struct.Struct(f"{BOARD_BYTES}s")
# By their addresses, as torch's types and Python's code take a microsecond to spell or to hash;
# what stands here is kept alive with it.
_passing: dict[int, tuple[CodeType, bool]] = {}
_places: dict[tuple[int, int], tuple[CodeType, bytes]] = {}
_dtypes: dict[torch.dtype, bytes] = {}


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
    same_size: bool = True
    """Whether all members give as many elements."""
    issued_ns: int = 0
    """When it was issued, on the wall clock; 0 where nobody records."""
    first: int = 0
    """The first rank of its group: groups of one name have different ones."""

    def __str__(self) -> str:
        what = f"{self.op} number {self.number} of group {self.group}, {self.elements:,} elements"
        return f"{what} of {str(self.dtype).removeprefix('torch.')}, at {self.where}"


class Waits(NamedTuple):
    """That the process is blocked."""

    entry: Entry
    since_s: float
    """On the monotonic clock."""


class Flying(NamedTuple):
    """Work that a device was given and may not have done yet."""

    entry: Entry
    works: Sequence[dist.Work]


class Journal:
    """The last collectives of a process."""

    def __init__(self, keep: int = 1024) -> None:
        self.entries: deque[Entry] = deque(maxlen=keep)
        self.digests: dict[str, int] = {}
        """For each group a checksum of everything it did so far."""
        self.counts: dict[str, int] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        """For each group its ranks."""
        self.waits: Waits | None = None
        """What the process is blocked in."""
        self.flying: Flying | None = None
        """The last thing that was left to a device's own queue."""
        self.failed: Entry | None = None
        """What the process could not finish, because the way to the others broke."""
        self.board: memoryview | None = None
        """Memory in which the last entry stands in words, for others to read after a death."""
        self.recorder: Recorder | None = None
        self.excuse: tuple[str, float] = ("", 0.0)
        """What the process does that others may wait long for, and until when, on that clock."""

    @contextmanager
    def excused(self, what: str, most_s: float) -> Iterator[None]:
        """Announce work that others may wait for longer than they wait for one another."""
        self.excuse = (what, time.monotonic() + most_s)
        try:
            yield
        finally:
            self.excuse = ("", 0.0)

    def enrol(self, group: str, ranks: tuple[int, ...]) -> None:
        """Write down who a group is."""
        if group not in self.members:
            self.members[group] = ranks
            self.counts[group] = self.digests[group] = 0

    def note(
        self,
        group: str,
        op: str,
        tensor: torch.Tensor,
        where: Where | None = None,
        *,
        same_size: bool = True,
    ) -> Entry:
        """Write down that a collective is about to be issued."""
        number = self.counts.get(group, 0) + 1
        self.counts[group] = number
        elements, dtype = tensor.numel(), tensor.dtype
        kind = _dtypes.get(dtype)
        if kind is None:
            kind = _dtypes[dtype] = str(dtype).encode()
        mark = b"%b:%d:%b" % (op.encode(), elements if same_size else 0, kind)
        self.digests[group] = zlib.crc32(mark, self.digests.get(group, 0))
        issued_ns = 0 if self.recorder is None else time.time_ns()
        where = where or here()
        first = self.members[group][0] if group in self.members else 0
        entry = Entry(number, group, op, elements, dtype, where, same_size, issued_ns, first)
        self.entries.append(entry)
        if self.board is not None:
            self._post(entry, self.board)
        return entry

    def enter(self, entry: Entry) -> int:
        """Write down that the process blocks until this is done; return when it began to."""
        self.waits = Waits(entry, time.monotonic())
        if self.board is not None and entry is not self.entries[-1]:
            self._post(entry, self.board)
        return 0 if self.recorder is None else time.time_ns()

    def leave(self, entry: Entry, waits_since_ns: int) -> None:
        """Write down that it is done."""
        self.waits = None
        if self.recorder is not None and waits_since_ns:
            self.recorder.collective(
                entry.group,
                entry.op,
                entry.elements * entry.dtype.itemsize,
                entry.dtype,
                issued_ns=entry.issued_ns,
                waits_since_ns=waits_since_ns,
                end_ns=time.time_ns(),
            )

    def fail(self, entry: Entry) -> None:
        """Write down that it cannot be done, because the way to another rank broke."""
        self.waits, self.failed = None, entry

    def _post(self, entry: Entry, board: memoryview) -> None:
        where, place = entry.where, b""
        if where is not None:
            code, line = where
            known = _places.get((id(code), line))
            if known is None:
                known = (code, f"{code.co_filename}\t{line}\t{code.co_name}".encode())
                _places[id(code), line] = known
            place = known[1]
        numbers = (entry.number, entry.elements, entry.same_size, entry.first)
        names = (_dtypes[entry.dtype], entry.op.encode(), entry.group.encode(), place)
        _BOARD.pack_into(board, 0, b"%d\t%d\t%d\t%d\t%b\t%b\t%b\t%b" % (*numbers, *names))


def here() -> Where | None:
    """Return the nearest calling line that is not one of those that only pass calls on."""
    return nearest(sys._getframe(1))  # noqa: SLF001 - costs no list of all frames


def nearest(frame: FrameType | None) -> Where | None:
    """Return the line of a frame, or of its nearest caller that does more than pass calls on."""
    while frame is not None:
        code = frame.f_code
        known = _passing.get(id(code))
        if known is None:
            name = code.co_filename
            known = _passing[id(code)] = (code, any(part in name for part in _INSIDE))
        if not known[1]:
            return Where(code, frame.f_lineno)
        frame = frame.f_back
    return None
