"""`Watchdog`: ends a job whose ranks cannot go on, and says why, before a time-out does.

A thread on each rank looks around twice a second. It ends the process when a rank of this host
died, when any rank raised, when one does something else than this, or when this one has waited in
one collective for longer than its patience. Who finds out first tells all through the store; so
every rank ends within a second or two, with the same words. The thread can do so while the program
is blocked in a library.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.collective.stall_diagnosis import CollectiveStallError
from meshwright.run.parallel.flight_recorder import (
    FlightRecord,
    FlightRecorder,
    InFlightWork,
    find_frame_call_site,
)
from meshwright.run.parallel.health.hang_diagnosis import (
    HangDiagnosis,
    JobSnapshot,
    diagnose_hang,
    find_divergence,
    list_missing_members,
)
from meshwright.run.parallel.health.rank_health import (
    BackgroundStatus,
    CollectiveRecord,
    RankHealth,
    RankLifecycle,
    describe_rank_health,
    replace_with_background,
)
from meshwright.run.parallel.health.status_store import StatusStore
from meshwright.run.parallel.launch.exit_reason import WATCHDOG_EXIT_CODE, send_exit_reason
from meshwright.run.parallel.mesh import Mesh

_LOOK_S = 1.0
"""A wait that is longer is looked into."""
_LEFT_S = 2.0
"""A rank that has left may still have sent what others wait for; after so long it has not."""
_CLOSING_S = 2.0
"""How long the end of a process waits for its timeline to lie on the disk."""
_SETTLE_S = 3.0
"""How long a rank whose connection broke waits to hear whose fault it is."""
_LATELY = 3
"""Collectives that a rank tells of besides the one it is in."""
_AT_ONCE = 64
"""Members of a group whose statuses a waiting rank reads in one look."""


class _Blocked(NamedTuple):
    entry: FlightRecord
    seconds: float


class Watchdog:
    """Watches over one rank; every rank of a mesh has one, made at the same point.

        with Watchdog(mesh, folder=run) as watchdog:
            train()

    `timeout_s` is how long a rank may wait in one collective, `heartbeat_timeout_s` after how long
    a rank that is not heard counts as gone while others wait for it. The last words of each rank go
    to whoever started all, or to standard error; where there is a `folder`, in whole into its
    `watchdog-rank-00003.txt`.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        timeout_s: float = 60.0,
        folder: str | Path | None = None,
        tick_s: float = 0.5,
        heartbeat_timeout_s: float = 10.0,
    ) -> None:
        given = {
            "timeout_s": timeout_s,
            "tick_s": tick_s,
            "heartbeat_timeout_s": heartbeat_timeout_s,
        }
        wrong = {name: value for name, value in given.items() if not value > 0}
        if wrong:
            fix = "use more than 0"
            raise InputError([Problem(name, f"{value:g} s", fix) for name, value in wrong.items()])
        self.rank, self.flight_recorder, self.background_recorder = (
            mesh.rank,
            mesh.flight_recorder,
            mesh.background_recorder,
        )
        self.timeout_s, self._tick_s, self._silent_s = timeout_s, tick_s, heartbeat_timeout_s
        self._folder = None if folder is None else Path(folder)
        self._beat, self._looks = 0, 0
        self._deaf, self._ended = False, frozenset[int]()
        """Whether the store is lost: torch is loud about every further attempt, so there is none.
        And the ranks of this host that had ended by then."""
        self._queued: tuple[InFlightWork, float] | None = None
        self._heard: dict[int, tuple[int, float]] = {}
        """The last beat of each rank, and when it was first seen here."""
        self._over, self._lost = threading.Event(), False
        self._board: StatusStore | None = None
        if mesh.world.size > 1:
            self._board = StatusStore(self.rank, mesh.world.size, self.flight_recorder)
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.report_error(error)

    def close(self) -> None:
        """Rest: this rank has done its work."""
        self._rest("exited", "")

    def report_error(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on, so that they stop at once.

        Where the error is only that another rank is gone, the process ends here.
        """
        if self._board is None:
            return
        broke = self.flight_recorder.failed or self.background_recorder.failed
        if broke is not None or isinstance(error, CollectiveStallError):
            self._lost = True
            self._thread.join(_SETTLE_S)
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        note = f"{type(error).__name__}: {error}"[:2000] + place
        self._rest("raised", note)
        mine = self._status(state="raised", note=note)
        if self._deaf:
            return
        with contextlib.suppress(RuntimeError):
            self._board.post_diagnosis(
                diagnose_hang(JobSnapshot(self._board.read() | {self.rank: mine}), self.rank)
            )

    def _rest(self, state: RankLifecycle, note: str) -> None:
        if self._board is None or self._over.is_set():
            return
        self._over.set()
        self._thread.join(2 * self._tick_s + 1)
        if not self._deaf:
            with contextlib.suppress(RuntimeError):
                self._board.publish(self._status(state=state, note=note))
        self._board.close(self.flight_recorder)

    def _run(self) -> None:
        # Never woken by the program: a thread that wakes with each collective competes with it.
        while not self._over.wait(self._tick_s / 4 if self._lost else self._tick_s):
            verdict = self._tick()
            if verdict is not None and not self._over.is_set():
                self._end(verdict)

    def _tick(self) -> HangDiagnosis | None:
        board = self._board
        assert board is not None, "there are others"
        self._beat += 1
        blocked, aside = self._blocked(), _waits(self.background_recorder)
        mine = self._status(blocked=blocked)
        if self._deaf:
            return self._alone(board, mine, blocked or aside)
        try:
            board.publish(mine)
            verdict = board.read_diagnosis() or self._look(board, mine)
            verdict = verdict or self._judge(board, mine, blocked, _as_it_is)
            verdict = verdict or self._judge(board, mine, aside, replace_with_background)
            return None if verdict is None else board.post_diagnosis(verdict)
        except RuntimeError:  # the store is gone, and with it the process that holds it
            # Later, those who end because of it would be named too.
            self._deaf, self._ended = True, board.exited_ranks()
            return None

    def _alone(
        self, board: StatusStore, mine: RankHealth, blocked: _Blocked | None
    ) -> HangDiagnosis | None:
        """Judge without the store: who holds it may have ended well, but not while others wait."""
        waits = blocked is not None and blocked.seconds > _LEFT_S
        if not waits and not self._lost:
            return None
        ended = sorted(self._ended or board.exited_ranks())
        who = "; ".join(
            f"rank {rank} ended, its process is gone; it was last in {board.last_record(rank)}"
            for rank in ended
        )
        what = "the job's store is gone, with the process that held it"
        text = f"{who or 'the rank that held the store (usually rank 0) is gone'}: {what}"
        return HangDiagnosis(tuple(ended) or (0,), f"{text}\n  {describe_rank_health(mine)}")

    def _look(self, board: StatusStore, mine: RankHealth) -> HangDiagnosis | None:
        """Judge those of this host that died."""
        dead = board.dead_ranks()
        return (
            diagnose_hang(JobSnapshot(board.read() | {self.rank: mine}, dead), self.rank)
            if dead
            else None
        )

    def _judge(
        self,
        board: StatusStore,
        status: RankHealth,
        blocked: _Blocked | None,
        view: Callable[[RankHealth], RankHealth],
    ) -> HangDiagnosis | None:
        """Judge those that this rank waits for, of whose statuses `view` is what matters."""
        if blocked is None or blocked.seconds < _LOOK_S:
            return None
        mine = view(status)

        def read(ranks: Sequence[int] | None = None) -> dict[int, RankHealth]:
            return {rank: view(each) for rank, each in board.read(ranks).items()} | {
                self.rank: mine
            }

        near = read(self._some(mine.group_ranks))
        left = [
            rank for rank in list_missing_members(near, self.rank) if near[rank].state == "exited"
        ]
        silent = self._silent(near)
        if find_divergence(near) is not None or silent or (left and blocked.seconds > _LEFT_S):
            return diagnose_hang(JobSnapshot(read(), ranks_without_heartbeat=silent), self.rank)
        if blocked.seconds < self.timeout_s:
            return None
        everyone = read()
        verdict = diagnose_hang(
            JobSnapshot(everyone, ranks_without_heartbeat=self._silent(everyone)), self.rank
        )
        excused = any(everyone[rank].expected_delay_s > 0 for rank in verdict.culprit_ranks)
        return None if excused else verdict

    def _some(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the members to look at now: all of a small group, in turn those of a large one."""
        if len(members) <= _AT_ONCE:
            return members
        self._looks += 1
        first = (self.rank + self._looks * _AT_ONCE) % len(members)
        return (members + members)[first : first + _AT_ONCE]

    def _silent(self, statuses: dict[int, RankHealth]) -> frozenset[int]:
        now, found = time.monotonic(), set()
        for rank, status in statuses.items():
            beat, since = self._heard.get(rank, (-1, now))
            if status.heartbeat != beat:
                self._heard[rank] = (status.heartbeat, now)
            elif now - since > self._silent_s and status.state == "running" and rank != self.rank:
                found.add(rank)
        return frozenset(found)

    def _blocked(self) -> _Blocked | None:
        """Return what this rank waits in: the program itself, or its device."""
        now, waits = time.monotonic(), _waits(self.flight_recorder)
        if waits is not None:
            return waits
        # A device's queue: one thing in it is followed to its end, then the last one is.
        if self._queued is not None and _unfinished(self._queued[0]):
            return _Blocked(self._queued[0].record, now - self._queued[1])
        flying = self.flight_recorder.in_flight
        self._queued = None if flying is None or not _unfinished(flying) else (flying, now)
        return None

    def _status(
        self, *, state: RankLifecycle = "running", note: str = "", blocked: _Blocked | None = None
    ) -> RankHealth:
        journal = self.flight_recorder
        assert self._board is not None, "there are others"
        entry = _at(journal, blocked)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        excuse, excuse_s = _excuse(journal)
        return msgspec.structs.replace(
            self._board.initial_health,
            heartbeat=self._beat,
            state="lost" if self._lost and state == "running" else state,
            error=note,
            current_collective=None if entry is None else CollectiveRecord.from_record(entry),
            wait_s=None if blocked is None else round(blocked.seconds, 3),
            group_ranks=() if entry is None else journal.group_ranks.get(entry.group, ()),
            recent_collectives=tuple(
                CollectiveRecord.from_record(each) for each in list(journal.records)[-_LATELY:]
            ),
            collective_counts=dict(journal.counts) | dict(self.background_recorder.counts),
            current_line=str(find_frame_call_site(frame) or ""),
            expected_delay=excuse,
            expected_delay_s=excuse_s,
            background=self._aside(),
        )

    def _aside(self) -> BackgroundStatus | None:
        """Return what this rank does beside training, or else held up by its main thread."""
        journal = self.background_recorder
        if not journal.group_ranks:
            return None
        blocked = _waits(journal)
        entry = _at(journal, blocked)
        excuse, excuse_s = _excuse(journal if journal.expected_delay[0] else self.flight_recorder)
        return BackgroundStatus(
            current_collective=None if entry is None else CollectiveRecord.from_record(entry),
            wait_s=None if blocked is None else round(blocked.seconds, 3),
            group_ranks=() if entry is None else journal.group_ranks.get(entry.group, ()),
            expected_delay=excuse,
            expected_delay_s=excuse_s,
        )

    def _end(self, verdict: HangDiagnosis) -> None:
        """End this process, whatever it is blocked in."""
        words = shown = f"meshwright: rank {self.rank} ends: {verdict.message}\n"
        if self._folder is not None:
            with contextlib.suppress(OSError):
                kept = self._folder / f"watchdog-rank-{self.rank:05d}.txt"
                kept.write_text(words)
                head = words.partition("\n")[0]
                shown = f"{head}\n  what every rank did then is in {kept}\n"
        if not send_exit_reason(self.rank, verdict.culprit_ranks, verdict.message):
            with contextlib.suppress(OSError):
                os.write(2, shown.encode())
        if self.flight_recorder.timeline_recorder is not None:
            self.flight_recorder.timeline_recorder.close_within(_CLOSING_S)
        if self._board is not None:
            self._board.close(self.flight_recorder)
        os._exit(WATCHDOG_EXIT_CODE)


def _as_it_is(status: RankHealth) -> RankHealth:
    return status


def _waits(journal: FlightRecorder) -> _Blocked | None:
    """Return what the program waits in, as a journal says."""
    waits = journal.blocked_call
    return None if waits is None else _Blocked(waits.record, time.monotonic() - waits.started_s)


def _at(journal: FlightRecorder, blocked: _Blocked | None) -> FlightRecord | None:
    """Return what a journal's rank is in, or was last in."""
    entry = blocked.entry if blocked is not None else journal.failed
    return journal.records[-1] if entry is None and journal.records else entry


def _excuse(journal: FlightRecorder) -> tuple[str, float]:
    """Return what a rank announced, and for how much longer it may take."""
    what, until = journal.expected_delay
    return what, max(0.0, until - time.monotonic()) if what else 0.0


def _unfinished(flying: InFlightWork) -> bool:
    return any(not work.is_completed() for work in flying.works)
