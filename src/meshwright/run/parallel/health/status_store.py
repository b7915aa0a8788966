"""`StatusStore`: where ranks leave their statuses and the bell for each other.

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

from meshwright.run.parallel.collective.progress_table import get_process_start_time
from meshwright.run.parallel.collective.shared_memory import get_host_id
from meshwright.run.parallel.flight_recorder import SHARED_PAGE_BYTES, FlightRecorder
from meshwright.run.parallel.health.hang_diagnosis import HangDiagnosis
from meshwright.run.parallel.health.rank_health import CollectiveRecord, RankHealth

_FOLDER = Path("/dev/shm")
_MEETING_S = 300.0
"""How long ranks may take to come to the point where they make their alarms."""
_BELL = "bell"


class _Hello(msgspec.Struct, frozen=True):
    status: RankHealth
    page: str


class StatusStore:
    """The statuses of all ranks, as one of them reads and writes them."""

    def __init__(self, rank: int, ranks: int, journal: FlightRecorder) -> None:
        """Meet all ranks; each of them does so at the same point."""
        shared = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way
        # A job may make one alarm after another.
        number = shared.add(f"meshwright/watchdogs/{rank}", 1)
        # Its own connection: the program's may be busy in a call that waits.
        own: Any = PrefixStore(f"meshwright/watchdog/{number}", shared)
        self._store: Store = own.clone()  # torch's types do not know of it
        self._store.set_timeout(timedelta(seconds=_MEETING_S))
        self.rank, self._ranks = rank, ranks
        pid = os.getpid()
        self.initial_health = RankHealth(
            rank=rank, host=get_host_id(), pid=pid, process_start=get_process_start_time(pid)
        )
        self._page = (
            _FOLDER / f"meshwright-watchdog-{uuid.uuid4().hex}" if _FOLDER.is_dir() else None
        )
        if self._page is not None:
            journal.shared_page = memoryview(_mapped(self._page, make=True))
        self._say("status", self.initial_health)
        self._say("hello", _Hello(self.initial_health, str(self._page or "")))
        everyone = self._store.multi_get([f"hello/{other}" for other in range(ranks)])
        hellos = [msgspec.json.decode(each, type=_Hello) for each in everyone]
        self._mates = {
            each.status.rank: each
            for each in hellos
            if each.status.host == self.initial_health.host
        }
        """The ranks of this host."""
        self._pages = {
            mate: memoryview(_mapped(Path(each.page), make=False))
            for mate, each in self._mates.items()
            if each.page
        }
        if self._store.add(f"mapped/{self.initial_health.host}", 1) == len(self._mates):
            for each in self._mates.values():
                if each.page:
                    Path(each.page).unlink(missing_ok=True)
        self._gone: set[int] = set()
        """Ranks of this host whose processes ended well."""

    def publish(self, status: RankHealth) -> None:
        """Let the others read what this rank does."""
        self._say("status", status)

    def read(self, ranks: Sequence[int] | None = None) -> dict[int, RankHealth]:
        """Return the statuses of some ranks, of all without."""
        wanted = range(self._ranks) if ranks is None else ranks
        found = self._store.multi_get([f"status/{rank}" for rank in wanted])
        statuses = [msgspec.json.decode(each, type=RankHealth) for each in found]
        return {each.rank: self._updated(each) for each in statuses}

    def dead_ranks(self) -> frozenset[int]:
        """Return the ranks of this host whose processes ended before their work did."""
        found = set(self.exited_ranks())
        if found:
            over = {
                rank for rank, each in self.read(sorted(found)).items() if each.state == "exited"
            }
            self._gone |= over
            found -= over
        return frozenset(found)

    def exited_ranks(self) -> frozenset[int]:
        """Return the ranks of this host whose processes ended, well or not; asks no store."""
        return frozenset(
            rank
            for rank, mate in self._mates.items()
            if rank not in self._gone
            and get_process_start_time(mate.status.pid) != mate.status.process_start
        )

    def last_record(self, rank: int) -> CollectiveRecord | None:
        """Return what a rank of this host issued last; asks no store."""
        page = self._pages.get(rank)
        return None if page is None else CollectiveRecord.parse_shared_page(bytes(page))

    def post_diagnosis(self, verdict: HangDiagnosis) -> HangDiagnosis:
        """Tell all ranks to end; return what they are told, which is what was said first."""
        said = msgspec.json.encode(verdict).decode()
        return msgspec.json.decode(self._store.compare_set(_BELL, "", said), type=HangDiagnosis)

    def read_diagnosis(self) -> HangDiagnosis | None:
        """Return why to end, where somebody has said so."""
        if not self._store.check([_BELL]):
            return None
        return msgspec.json.decode(self._store.get(_BELL), type=HangDiagnosis)

    def close(self, journal: FlightRecorder) -> None:
        """Leave nothing behind."""
        journal.shared_page = None
        self._forget_page()

    def _say(self, what: str, said: object) -> None:
        self._store.set(f"{what}/{self.rank}", msgspec.json.encode(said).decode())

    def _updated(self, status: RankHealth) -> RankHealth:
        """Put in what a rank of this host has done since it spoke."""
        seen = None if status.wait_s is not None else self.last_record(status.rank)
        if seen is None:
            return status
        counts = status.collective_counts | {
            seen.group: max(seen.sequence_number, status.collective_counts.get(seen.group, 0))
        }
        same = (
            status.current_collective is not None and status.current_collective.group == seen.group
        )
        members = status.group_ranks if same else ()
        return msgspec.structs.replace(
            status, current_collective=seen, collective_counts=counts, group_ranks=members
        )

    def _forget_page(self) -> None:
        if self._page is not None:
            self._page.unlink(missing_ok=True)
            self._page = None


def _mapped(path: Path, *, make: bool) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
    try:
        if make:
            os.ftruncate(handle, SHARED_PAGE_BYTES)
        return mmap.mmap(handle, SHARED_PAGE_BYTES)
    finally:
        os.close(handle)
