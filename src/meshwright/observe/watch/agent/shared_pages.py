"""The two pages of memory that a watched process and its watcher share as files.

A process writes when its steps ended, the watcher writes what it asks for. Both map the file, so a
step costs neither a system call nor a lock, and what was written outlives a process that is killed.

step page: 128 bytes of head, then a ring of records of 16 bytes:
    head    magic 8s, pid u32, rank i32, capacity u32, state u32, steps u64, first u64, spent u64,
            captures u64, cost u64, answered u64
    record  end of the step u64 ns (monotonic), then the agent's own time u32 us, mark u32
control page: request u64, first step u64, steps u64
"""

import mmap
import os
from struct import Struct
from typing import NamedTuple

MAGIC = b"MWSTEPS1"
HEAD_BYTES = 128
CAPACITY = 65_536
"""Steps that are kept; the ring is 1 MiB."""
HEAD = Struct("<8sIiIIQQQQQQ")
RECORD = Struct("<QII")
CONTROL = Struct("<QQQ")
PLAIN, CAPTURED = 0, 1
RUNNING, ENDED, PROFILES_ITSELF, CAPTURES_OFF, FAILED = 0, 1, 2, 4, 8
_STATE = 20
_COUNTS = Struct("<QQQQQQ")
_FIRST_COUNT = 24
_LONGEST_US = 2**32 - 1


class CaptureCommand(NamedTuple):
    """What the watcher asks of all ranks."""

    number: int
    """Counted from 1; 0 where nothing was asked yet."""
    first_step: int
    num_steps: int


def _new(path: str, size: int) -> int:
    """Open a new file that has its place on the disk: a page without one would end its writer.

    A file of the same name, by a process that had this number before, stays as it is to whoever has
    mapped it.
    """
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError:
        os.close(handle)
        os.unlink(path)  # noqa: PTH108
        raise
    return handle


class StepPage:
    """The page that one process writes."""

    def __init__(self, path: str, pid: int, rank: int, started_ns: int) -> None:
        size = HEAD_BYTES + CAPACITY * RECORD.size
        handle = _new(path, size)
        try:
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self.num_steps = self.overhead_ns = self.num_captures = self.capture_cost_ns = (
            self.last_answered_request
        ) = 0
        self._started_ns, self._state = started_ns, RUNNING
        HEAD.pack_into(
            self._map, 0, MAGIC, pid, rank, CAPACITY, RUNNING, 0, started_ns, 0, 0, 0, 0
        )  # fmt: skip

    def add(self, ended_ns: int, own_ns: int, mark: int) -> None:
        """Write down one step, with the time that the agent took between it and the next."""
        place = HEAD_BYTES + (self.num_steps % CAPACITY) * RECORD.size
        RECORD.pack_into(self._map, place, ended_ns, min(own_ns // 1000, _LONGEST_US), mark)
        self.num_steps += 1
        self.overhead_ns += own_ns
        self._write_counts()

    def record_capture(self, cost_ns: int, beyond_ns: int, answered: int) -> None:
        """Count a capture; `beyond_ns` of its cost is not among the agent's own time."""
        self.num_captures += 1
        self.capture_cost_ns, self.last_answered_request = cost_ns, answered
        self.overhead_ns += beyond_ns
        self._write_counts()

    def reject_request(self, answered: int) -> None:
        """Answer a request without a capture."""
        self.last_answered_request = answered
        self._write_counts()

    def set_state(self, bit: int, on: bool) -> None:
        """Switch one bit of the state."""
        self._state = self._state | bit if on else self._state & ~bit
        self._map[_STATE : _STATE + 4] = self._state.to_bytes(4, "little")

    def _write_counts(self) -> None:
        _COUNTS.pack_into(
            self._map, _FIRST_COUNT, self.num_steps, self._started_ns, self.overhead_ns,
            self.num_captures, self.capture_cost_ns, self.last_answered_request,
        )  # fmt: skip


class ControlPage:
    """What the watcher asks for; processes only read it."""

    def __init__(self, path: str, *, writes: bool = False) -> None:
        handle = _new(path, CONTROL.size) if writes else os.open(path, os.O_RDONLY)
        try:
            access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
            self._map = mmap.mmap(handle, CONTROL.size, access=access)
        finally:
            os.close(handle)

    def read(self) -> CaptureCommand:
        """Return the newest request."""
        return CaptureCommand(*CONTROL.unpack_from(self._map))

    def write(self, request: CaptureCommand) -> None:
        """Ask; the number goes last, as it says that the rest is there."""
        CONTROL.pack_into(self._map, 0, self.read().number, request.first_step, request.num_steps)
        CONTROL.pack_into(self._map, 0, *request)
