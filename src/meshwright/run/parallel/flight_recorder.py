"""`FlightRecorder`: the collectives of one process, in order, with their call sites.

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

from meshwright.run.parallel.timeline_recorder import TimelineRecorder

_INSIDE = (
    "/meshwright/run/parallel/", "/checkpoint/rank_coordinator.py", "/torch/", "/threading.py",
)  # fmt: skip
"""Code that passes calls on: the line that matters is the one before."""
SHARED_PAGE_BYTES = 1024
_BOARD = struct.Struct(f"{SHARED_PAGE_BYTES}s")
# By their addresses, as torch's types and Python's code take a microsecond to spell or to hash;
# what stands here is kept alive with it.
_passing: dict[int, tuple[CodeType, bool]] = {}
_places: dict[tuple[int, int], tuple[CodeType, bytes]] = {}
_dtypes: dict[torch.dtype, bytes] = {}


class CallSite(NamedTuple):
    """A line of the program."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line} ({self.code.co_name})"


class FlightRecord(NamedTuple):
    """One thing done together."""

    sequence_number: int
    """Its number within the group, counted from 1."""
    group: str
    op: str
    elements: int
    dtype: torch.dtype
    call_site: CallSite | None
    same_size: bool = True
    """Whether all members give as many elements."""
    issued_ns: int = 0
    """When it was issued, on the wall clock; 0 where nobody records."""
    first_rank: int = 0
    """The first rank of its group: groups of one name have different ones."""

    def __str__(self) -> str:
        what = (
            f"{self.op} number {self.sequence_number} of group {self.group}, {self.elements:,} "
            f"elements"
        )
        return f"{what} of {str(self.dtype).removeprefix('torch.')}, at {self.call_site}"


class BlockedCall(NamedTuple):
    """That the process is blocked."""

    record: FlightRecord
    started_s: float
    """On the monotonic clock."""


class InFlightWork(NamedTuple):
    """Work that a device was given and may not have done yet."""

    record: FlightRecord
    works: Sequence[dist.Work]


class FlightRecorder:
    """The last collectives of a process."""

    def __init__(self, keep: int = 1024) -> None:
        self.records: deque[FlightRecord] = deque(maxlen=keep)
        self.checksums: dict[str, int] = {}
        """For each group a checksum of everything it did so far."""
        self.counts: dict[str, int] = {}
        self.group_ranks: dict[str, tuple[int, ...]] = {}
        """For each group its ranks."""
        self.blocked_call: BlockedCall | None = None
        """What the process is blocked in."""
        self.in_flight: InFlightWork | None = None
        """The last thing that was left to a device's own queue."""
        self.failed: FlightRecord | None = None
        """What the process could not finish, because the way to the others broke."""
        self.shared_page: memoryview | None = None
        """Memory in which the last entry stands in words, for others to read after a death."""
        self.timeline_recorder: TimelineRecorder | None = None
        self.expected_delay: tuple[str, float] = ("", 0.0)
        """What the process does that others may wait long for, and until when, on that clock."""

    @contextmanager
    def expect_delay(self, what: str, most_s: float) -> Iterator[None]:
        """Announce work that others may wait for longer than they wait for one another."""
        self.expected_delay = (what, time.monotonic() + most_s)
        try:
            yield
        finally:
            self.expected_delay = ("", 0.0)

    def register_group(self, group: str, ranks: tuple[int, ...]) -> None:
        """Write down who a group is."""
        if group not in self.group_ranks:
            self.group_ranks[group] = ranks
            self.counts[group] = self.checksums[group] = 0

    def record(
        self,
        group: str,
        op: str,
        tensor: torch.Tensor,
        where: CallSite | None = None,
        *,
        same_size: bool = True,
    ) -> FlightRecord:
        """Write down that a collective is about to be issued."""
        number = self.counts.get(group, 0) + 1
        self.counts[group] = number
        elements, dtype = tensor.numel(), tensor.dtype
        kind = _dtypes.get(dtype)
        if kind is None:
            kind = _dtypes[dtype] = str(dtype).encode()
        mark = b"%b:%d:%b" % (op.encode(), elements if same_size else 0, kind)
        self.checksums[group] = zlib.crc32(mark, self.checksums.get(group, 0))
        issued_ns = 0 if self.timeline_recorder is None else time.time_ns()
        where = where or find_call_site()
        first = self.group_ranks[group][0] if group in self.group_ranks else 0
        entry = FlightRecord(number, group, op, elements, dtype, where, same_size, issued_ns, first)
        self.records.append(entry)
        if self.shared_page is not None:
            self._post(entry, self.shared_page)
        return entry

    def begin_wait(self, entry: FlightRecord) -> int:
        """Write down that the process blocks until this is done; return when it began to."""
        self.blocked_call = BlockedCall(entry, time.monotonic())
        if self.shared_page is not None and entry is not self.records[-1]:
            self._post(entry, self.shared_page)
        return 0 if self.timeline_recorder is None else time.time_ns()

    def end_wait(self, entry: FlightRecord, waits_since_ns: int) -> None:
        """Write down that it is done."""
        self.blocked_call = None
        if self.timeline_recorder is not None and waits_since_ns:
            self.timeline_recorder.record_collective(
                entry.group,
                entry.op,
                entry.elements * entry.dtype.itemsize,
                entry.dtype,
                issued_ns=entry.issued_ns,
                waits_since_ns=waits_since_ns,
                end_ns=time.time_ns(),
            )

    def mark_failed(self, entry: FlightRecord) -> None:
        """Write down that it cannot be done, because the way to another rank broke."""
        self.blocked_call, self.failed = None, entry

    def _post(self, entry: FlightRecord, board: memoryview) -> None:
        where, place = entry.call_site, b""
        if where is not None:
            code, line = where
            known = _places.get((id(code), line))
            if known is None:
                known = (code, f"{code.co_filename}\t{line}\t{code.co_name}".encode())
                _places[id(code), line] = known
            place = known[1]
        numbers = (entry.sequence_number, entry.elements, entry.same_size, entry.first_rank)
        names = (_dtypes[entry.dtype], entry.op.encode(), entry.group.encode(), place)
        _BOARD.pack_into(board, 0, b"%d\t%d\t%d\t%d\t%b\t%b\t%b\t%b" % (*numbers, *names))


def find_call_site() -> CallSite | None:
    """Return the nearest calling line that is not one of those that only pass calls on."""
    return find_frame_call_site(sys._getframe(1))  # noqa: SLF001 - costs no list of all frames


def find_frame_call_site(frame: FrameType | None) -> CallSite | None:
    """Return the line of a frame, or of its nearest caller that does more than pass calls on."""
    while frame is not None:
        code = frame.f_code
        known = _passing.get(id(code))
        if known is None:
            name = code.co_filename
            known = _passing[id(code)] = (code, any(part in name for part in _INSIDE))
        if not known[1]:
            return CallSite(code, frame.f_lineno)
        frame = frame.f_back
    return None
