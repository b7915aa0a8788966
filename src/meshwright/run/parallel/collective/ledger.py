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

from meshwright.run.parallel.collective.segment import ROW_WORDS, Segment

PID, BORN, STATE, SEQUENCE, SIGNATURE, DONE, LAST, BEAT, AWAITED = range(9)
_STEP, _CHUNK, _PEER, _SENDS = range(9, 13)
BLAMED, WHY = 13, 14
_TEXT = 16
_TEXT_BYTES = (ROW_WORDS - _TEXT) * 8
NOTHING = -1
_PUBLISH_S = 0.5


class State(IntEnum):
    """Where a rank is."""

    OUTSIDE = 0
    """In no collective; the last one it was in is over for it."""
    INSIDE = 1
    GAVE_UP = 2
    """It raised an error in a collective, after waiting too long."""


class Spot(NamedTuple):
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


class Entry(NamedTuple):
    """A row of the ledger, as read."""

    pid: int
    born: int
    """Start of the process, in the system's ticks: process numbers are used again."""
    state: State
    sequence: int
    """Number of the collective it is in, or was in last; 0 before the first."""
    signature: int
    """What it believes the collective to be, as a number."""
    done: int
    """Tasks it finished in this collective."""
    last: int
    """The number of the task it finished last; `NOTHING` before the first."""
    beat_ns: int
    """When it last looked around while waiting, on the clock of its host."""
    awaited: Spot | None
    """What it waits for; None while it works."""
    blamed: int
    """The rank that it named when it gave up; `NOTHING` where it did not."""
    why: int
    """What it said of that rank, as a number."""
    text: str
    """The collective in words."""


class Ledger(Protocol):
    """Rows of all ranks."""

    mine: memoryview
    """The row of this rank, to write."""
    one_host: bool
    """Whether process numbers and clocks of all rows mean something here."""

    def read(self) -> list[Entry]:
        """Return the rows of all ranks, as far as they are known here."""
        ...

    def publish(self, *, at_once: bool = False) -> None:
        """Let the others see this rank's row, soon or at once."""
        ...


class SharedLedger:
    """The ledger of a team on one host."""

    one_host = True

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        self.mine = segment.row(rank)
        sign_in(self.mine)

    def read(self) -> list[Entry]:
        """Return the rows of all ranks."""
        return [_entry(self._segment.row(rank)) for rank in range(self._segment.ranks)]

    def publish(self, *, at_once: bool = False) -> None:
        """Do nothing: the rows are shared."""


class StoreLedger:
    """The ledger of a team over several hosts."""

    one_host = False

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank = store, rank
        self.mine = memoryview(bytearray(ROW_WORDS * 8)).cast("q")
        sign_in(self.mine)
        self._known = [_entry(self.mine)] * ranks
        self._beats: dict[int, tuple[int, int]] = {}
        """The last beat of each rank, and when it was first seen here."""
        self._published = 0.0
        self.publish(at_once=True)

    def read(self) -> list[Entry]:
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

    def _heard(self, rank: int, entry: Entry) -> Entry:
        """Put the beat on this host's clock: the time at which a new one was seen here."""
        beat, seen = self._beats.get(rank, (NOTHING, 0))
        if entry.beat_ns != beat:
            seen = time.monotonic_ns()
            self._beats[rank] = (entry.beat_ns, seen)
        return entry._replace(beat_ns=seen)

    def publish(self, *, at_once: bool = False) -> None:
        """Hand this rank's row to the store, but not too often: all ranks share it."""
        now = time.monotonic()
        if not at_once and now - self._published < _PUBLISH_S:
            return
        self._published = now
        try:
            self._store.set(_key(self._rank), self.mine.tobytes().hex())
        except RuntimeError:
            return


def sign_in(row: memoryview) -> None:
    """Write who this process is into its row."""
    row[PID], row[BORN] = os.getpid(), born(os.getpid())
    row[STATE], row[LAST], row[AWAITED] = State.OUTSIDE, NOTHING, NOTHING
    row[BLAMED] = NOTHING
    row[BEAT] = time.monotonic_ns()


def set_awaited(row: memoryview, number: int, spot: Spot) -> None:
    """Write down what a rank waits for."""
    row[_STEP], row[_CHUNK], row[_PEER] = spot.step, spot.chunk, spot.peer
    row[_SENDS] = spot.kind == "send"
    row[AWAITED] = number


def set_text(row: memoryview, text: str) -> None:
    """Write the name of a collective into a row."""
    raw = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    row[_TEXT:] = memoryview(raw).cast("q")


def born(pid: int) -> int:
    """Return when a process started; 0 where it is gone, or waits to be buried by its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name, in brackets, may hold blanks and brackets itself (proc(5)).
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def alive(entry: Entry) -> bool:
    """Whether the process of a row still runs on this host."""
    return born(entry.pid) == entry.born


def _key(rank: int) -> str:
    return f"ledger/{rank}"


def _entry(row: memoryview) -> Entry:
    text = row[_TEXT:].tobytes().rstrip(b"\0").decode(errors="replace")
    pid, since, state, sequence, signature, done, last, beat, awaited = row[:9].tolist()
    spot = None
    if awaited != NOTHING:
        kind = "send" if row[_SENDS] else "receive"
        spot = Spot(row[_STEP], row[_CHUNK], kind, row[_PEER])
    return Entry(
        pid=pid,
        born=since,
        state=State(state),
        sequence=sequence,
        signature=signature,
        done=done,
        last=last,
        beat_ns=beat,
        awaited=spot,
        blamed=row[BLAMED],
        why=row[WHY],
        text=text,
    )
