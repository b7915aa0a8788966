"""The progress ledger: what each rank of a team did last, and what it waits for.

A row is a few numbers that its rank overwrites as it goes. On one host the rows lie in shared
memory, so that a row can be read even after its rank died; across hosts each rank keeps its own and
hands it to the store from time to time.
"""

import os
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from torch._C._distributed_c10d import Store

from meshwright.run.parallel.collective.shared_memory import ROW_WORDS, SharedMemorySegment

PID, PROCESS_START, STATE, SEQUENCE, SIGNATURE, DONE, LAST, HEARTBEAT, WAITING_FOR = range(9)
_STEP, _CHUNK, _PEER, _SENDS = range(9, 13)
BLAMED_RANK, STALL_CAUSE = 13, 14
_TEXT = 16
_TEXT_BYTES = (ROW_WORDS - _TEXT) * 8
NO_VALUE = -1
_PUBLISH_S = 0.5


class ProgressState(IntEnum):
    """Where a rank is."""

    NOT_ENTERED = 0
    """In no collective; the last one it was in is over for it."""
    ENTERED = 1
    ABORTED = 2
    """It raised an error in a collective, after waiting too long."""


class PlanPosition(NamedTuple):
    """A place in a rank's program."""

    step: int
    chunk: int
    kind: str
    """`send`, `receive` or `local`."""
    peer: int

    def __str__(self) -> str:
        if self.kind == "local":
            return f"step {self.step}, chunk {self.chunk}"
        way = "to" if self.kind == "send" else "from"
        return f"step {self.step}, chunk {self.chunk} ({self.kind} {way} rank {self.peer})"


class RankProgress(NamedTuple):
    """A row of the ledger, as read."""

    pid: int
    process_start: int
    """Start of the process, in the system's ticks: process numbers are used again."""
    state: ProgressState
    sequence: int
    """Number of the collective it is in, or was in last; 0 before the first."""
    signature: int
    """What it believes the collective to be, as a number."""
    tasks_done: int
    """Tasks it finished in this collective."""
    last_task: int
    """The number of the task it finished last; `NO_VALUE` before the first."""
    heartbeat_ns: int
    """When it last looked around while waiting, on the clock of its host."""
    waiting_for: PlanPosition | None
    """What it waits for; None while it works."""
    blamed_rank: int
    """The rank that it named when it gave up; `NO_VALUE` where it did not."""
    stall_cause: int
    """What it said of that rank, as a number."""
    collective_name: str
    """The collective in words."""


class ProgressTable(Protocol):
    """Rows of all ranks."""

    own_row: memoryview
    """The row of this rank, to write."""
    is_single_host: bool
    """Whether process numbers and clocks of all rows mean something here."""

    def read(self) -> list[RankProgress]:
        """Return the rows of all ranks, as far as they are known here."""
        ...

    def publish(self, *, at_once: bool = False) -> None:
        """Let the others see this rank's row, soon or at once."""
        ...


class ShmProgressTable:
    """The ledger of a team on one host."""

    is_single_host = True

    def __init__(self, segment: SharedMemorySegment, rank: int) -> None:
        self._segment = segment
        self.own_row = segment.get_row(rank)
        register_process(self.own_row)

    def read(self) -> list[RankProgress]:
        """Return the rows of all ranks."""
        return [_entry(self._segment.get_row(rank)) for rank in range(self._segment.ranks)]

    def publish(self, *, at_once: bool = False) -> None:
        """Do nothing: the rows are shared."""


class StoreProgressTable:
    """The ledger of a team over several hosts."""

    is_single_host = False

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank = store, rank
        self.own_row = memoryview(bytearray(ROW_WORDS * 8)).cast("q")
        register_process(self.own_row)
        self._known = [_entry(self.own_row)] * ranks
        self._beats: dict[int, tuple[int, int]] = {}
        """The last beat of each rank, and when it was first seen here."""
        self._published = 0.0
        self.publish(at_once=True)

    def read(self) -> list[RankProgress]:
        """Return the rows as the store has them; the last known ones where it does not answer."""
        try:
            keys = [_key(rank) for rank in range(len(self._known))]
            rows = self._store.multi_get(keys)
        except RuntimeError:  # the store, and the rank that holds it, are gone
            return self._known
        self._known = [
            self._heard(rank, _entry(memoryview(bytes.fromhex(row.decode())).cast("q")))
            for rank, row in enumerate(rows)
        ]
        return self._known

    def _heard(self, rank: int, entry: RankProgress) -> RankProgress:
        """Put the beat on this host's clock: the time at which a new one was seen here."""
        beat, seen = self._beats.get(rank, (NO_VALUE, 0))
        if entry.heartbeat_ns != beat:
            seen = time.monotonic_ns()
            self._beats[rank] = (entry.heartbeat_ns, seen)
        return entry._replace(heartbeat_ns=seen)

    def publish(self, *, at_once: bool = False) -> None:
        """Hand this rank's row to the store, but not too often: all ranks share it."""
        now = time.monotonic()
        if not at_once and now - self._published < _PUBLISH_S:
            return
        self._published = now
        try:
            self._store.set(_key(self._rank), self.own_row.tobytes().hex())
        except RuntimeError:
            return


def register_process(row: memoryview) -> None:
    """Write who this process is into its row."""
    row[PID], row[PROCESS_START] = os.getpid(), get_process_start_time(os.getpid())
    row[STATE], row[LAST], row[WAITING_FOR] = ProgressState.NOT_ENTERED, NO_VALUE, NO_VALUE
    row[BLAMED_RANK] = NO_VALUE
    row[HEARTBEAT] = time.monotonic_ns()


def set_waiting_for(row: memoryview, number: int, spot: PlanPosition) -> None:
    """Write down what a rank waits for."""
    row[_STEP], row[_CHUNK], row[_PEER] = spot.step, spot.chunk, spot.peer
    row[_SENDS] = spot.kind == "send"
    row[WAITING_FOR] = number


def set_collective_name(row: memoryview, text: str) -> None:
    """Write the name of a collective into a row."""
    raw = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    row[_TEXT:] = memoryview(raw).cast("q")


def get_process_start_time(pid: int) -> int:
    """Return when a process started; 0 where it is gone, or waits to be buried by its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name, in brackets, may hold blanks and brackets itself (proc(5)).
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_alive(entry: RankProgress) -> bool:
    """Whether the process of a row still runs on this host."""
    return get_process_start_time(entry.pid) == entry.process_start


def _key(rank: int) -> str:
    return f"ledger/{rank}"


def _entry(row: memoryview) -> RankProgress:
    text = row[_TEXT:].tobytes().rstrip(b"\0").decode(errors="replace")
    pid, since, state, sequence, signature, done, last, beat, awaited = row[:9].tolist()
    spot = None
    if awaited != NO_VALUE:
        kind = "send" if row[_SENDS] else "receive"
        spot = PlanPosition(row[_STEP], row[_CHUNK], kind, row[_PEER])
    return RankProgress(
        pid=pid,
        process_start=since,
        state=ProgressState(state),
        sequence=sequence,
        signature=signature,
        tasks_done=done,
        last_task=last,
        heartbeat_ns=beat,
        waiting_for=spot,
        blamed_rank=row[BLAMED_RANK],
        stall_cause=row[STALL_CAUSE],
        collective_name=text,
    )
