"""`Noticeboard`: where ranks leave their statuses and the bell for each other.

Statuses and the bell go through the job's store. Besides, each rank has a page of memory with its
last journal entry, which the others of its host map: it can be read after its process died, when
the store only has what was said half a second before. The last one to map them takes the files'
names away, so that nothing is left behind.
"""

import mmap
import os
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from meshwright.run.parallel.collective.ledger import born
from meshwright.run.parallel.collective.segment import host_mark
from meshwright.run.parallel.journal import BOARD_BYTES, Journal
from meshwright.run.parallel.status import Seen, Status
from meshwright.run.parallel.verdict import Verdict

_FOLDER = Path("/dev/shm")
_MEETING_S = 300.0
"""How long ranks may take to come to the point where they make their alarms."""
_BELL = "bell"


class _Hello(msgspec.Struct, frozen=True):
    status: Status
    page: str


class Noticeboard:
    """The statuses of all ranks, as one of them reads and writes them."""

    def __init__(self, rank: int, ranks: int, journal: Journal) -> None:
        """Meet all ranks; each of them does so at the same point."""
        shared = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way
        # A job may make one alarm after another.
        number = shared.add(f"meshwright/alarms/{rank}", 1)
        # Its own connection: the program's may be busy in a call that waits.
        own: Any = PrefixStore(f"meshwright/alarm/{number}", shared)
        self._store: Store = own.clone()  # torch's types do not know of it
        self._store.set_timeout(timedelta(seconds=_MEETING_S))
        self.rank, self._ranks = rank, ranks
        pid = os.getpid()
        self.hello = Status(rank=rank, host=host_mark(), pid=pid, born=born(pid))
        self._page = _FOLDER / f"meshwright-alarm-{uuid.uuid4().hex}" if _FOLDER.is_dir() else None
        if self._page is not None:
            journal.board = memoryview(_mapped(self._page, make=True))
        self._say("status", self.hello)
        self._say("hello", _Hello(self.hello, str(self._page or "")))
        everyone = self._store.multi_get([f"hello/{other}" for other in range(ranks)])
        hellos = [msgspec.json.decode(each, type=_Hello) for each in everyone]
        self._mates = {
            each.status.rank: each for each in hellos if each.status.host == self.hello.host
        }
        """The ranks of this host."""
        self._pages = {
            mate: memoryview(_mapped(Path(each.page), make=False))
            for mate, each in self._mates.items()
            if each.page
        }
        if self._store.add(f"mapped/{self.hello.host}", 1) == len(self._mates):
            for each in self._mates.values():
                if each.page:
                    Path(each.page).unlink(missing_ok=True)
        self._gone: set[int] = set()
        """Ranks of this host whose processes ended well."""

    def publish(self, status: Status) -> None:
        """Let the others read what this rank does."""
        self._say("status", status)

    def read(self, ranks: Sequence[int] | None = None) -> dict[int, Status]:
        """Return the statuses of some ranks, of all without."""
        wanted = range(self._ranks) if ranks is None else ranks
        found = self._store.multi_get([f"status/{rank}" for rank in wanted])
        statuses = [msgspec.json.decode(each, type=Status) for each in found]
        return {each.rank: self._updated(each) for each in statuses}

    def dead(self) -> frozenset[int]:
        """Return the ranks of this host whose processes ended before their work did."""
        found = set(self.ended())
        if found:
            over = {rank for rank, each in self.read(sorted(found)).items() if each.state == "left"}
            self._gone |= over
            found -= over
        return frozenset(found)

    def ended(self) -> frozenset[int]:
        """Return the ranks of this host whose processes ended, well or not; asks no store."""
        return frozenset(
            rank
            for rank, mate in self._mates.items()
            if rank not in self._gone and born(mate.status.pid) != mate.status.born
        )

    def last_of(self, rank: int) -> Seen | None:
        """Return what a rank of this host issued last; asks no store."""
        page = self._pages.get(rank)
        return None if page is None else Seen.on(bytes(page))

    def ring(self, verdict: Verdict) -> Verdict:
        """Tell all ranks to end; return what they are told, which is what was said first."""
        said = msgspec.json.encode(verdict).decode()
        return msgspec.json.decode(self._store.compare_set(_BELL, "", said), type=Verdict)

    def heard(self) -> Verdict | None:
        """Return why to end, where somebody has said so."""
        if not self._store.check([_BELL]):
            return None
        return msgspec.json.decode(self._store.get(_BELL), type=Verdict)

    def close(self, journal: Journal) -> None:
        """Leave nothing behind."""
        journal.board = None
        self._forget_page()

    def _say(self, what: str, said: object) -> None:
        self._store.set(f"{what}/{self.rank}", msgspec.json.encode(said).decode())

    def _updated(self, status: Status) -> Status:
        """Put in what a rank of this host has done since it spoke."""
        seen = None if status.waits_s is not None else self.last_of(status.rank)
        if seen is None:
            return status
        counts = status.counts | {seen.group: max(seen.number, status.counts.get(seen.group, 0))}
        same = status.at is not None and status.at.group == seen.group
        members = status.members if same else ()
        return msgspec.structs.replace(status, at=seen, counts=counts, members=members)

    def _forget_page(self) -> None:
        if self._page is not None:
            self._page.unlink(missing_ok=True)
            self._page = None


def _mapped(path: Path, *, make: bool) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
    try:
        if make:
            os.ftruncate(handle, BOARD_BYTES)
        return mmap.mmap(handle, BOARD_BYTES)
    finally:
        os.close(handle)
