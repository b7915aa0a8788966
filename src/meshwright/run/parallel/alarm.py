"""`Alarm`: ends a job whose ranks cannot go on, and says why, before a time-out does.

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
from meshwright.run.parallel.collective.stall import CollectiveStalled
from meshwright.run.parallel.journal import Entry, Flying, Journal, nearest
from meshwright.run.parallel.launch.last_words import told
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.noticeboard import Noticeboard
from meshwright.run.parallel.status import Aside, Seen, State, Status, beside, describe
from meshwright.run.parallel.verdict import Scene, Verdict, absent, judge, parting

EXIT_CODE = 4
"""Of a process that ends because the job cannot go on."""
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
    entry: Entry
    seconds: float


class Alarm:
    """Watches over one rank; every rank of a mesh has one, made at the same point.

        with Alarm(mesh, folder=run) as alarm:
            train()

    `patience_s` is how long a rank may wait in one collective, `silent_s` after how long a rank
    that is not heard counts as gone while others wait for it. The last words of each rank go to
    whoever started all, or to standard error; where there is a `folder`, in whole into its
    `alarm-00003.txt`.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        patience_s: float = 60.0,
        folder: str | Path | None = None,
        tick_s: float = 0.5,
        silent_s: float = 10.0,
    ) -> None:
        given = {"patience_s": patience_s, "tick_s": tick_s, "silent_s": silent_s}
        wrong = {name: value for name, value in given.items() if not value > 0}
        if wrong:
            fix = "use more than 0"
            raise InputError([Problem(name, f"{value:g} s", fix) for name, value in wrong.items()])
        self.rank, self.journal, self.aside = mesh.rank, mesh.journal, mesh.aside
        self.patience_s, self._tick_s, self._silent_s = patience_s, tick_s, silent_s
        self._folder = None if folder is None else Path(folder)
        self._beat, self._looks = 0, 0
        self._deaf, self._ended = False, frozenset[int]()
        """Whether the store is lost: torch is loud about every further attempt, so there is none.
        And the ranks of this host that had ended by then."""
        self._queued: tuple[Flying, float] | None = None
        self._heard: dict[int, tuple[int, float]] = {}
        """The last beat of each rank, and when it was first seen here."""
        self._over, self._lost = threading.Event(), False
        self._board: Noticeboard | None = None
        if mesh.world.size > 1:
            self._board = Noticeboard(self.rank, mesh.world.size, self.journal)
            self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.raised(error)

    def close(self) -> None:
        """Rest: this rank has done its work."""
        self._rest("left", "")

    def raised(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on, so that they stop at once.

        Where the error is only that another rank is gone, the process ends here.
        """
        if self._board is None:
            return
        broke = self.journal.failed or self.aside.failed
        if broke is not None or isinstance(error, CollectiveStalled):
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
            self._board.ring(judge(Scene(self._board.read() | {self.rank: mine}), self.rank))

    def _rest(self, state: State, note: str) -> None:
        if self._board is None or self._over.is_set():
            return
        self._over.set()
        self._thread.join(2 * self._tick_s + 1)
        if not self._deaf:
            with contextlib.suppress(RuntimeError):
                self._board.publish(self._status(state=state, note=note))
        self._board.close(self.journal)

    def _run(self) -> None:
        # Never woken by the program: a thread that wakes with each collective competes with it.
        while not self._over.wait(self._tick_s / 4 if self._lost else self._tick_s):
            verdict = self._tick()
            if verdict is not None and not self._over.is_set():
                self._end(verdict)

    def _tick(self) -> Verdict | None:
        board = self._board
        assert board is not None, "there are others"
        self._beat += 1
        blocked, aside = self._blocked(), _waits(self.aside)
        mine = self._status(blocked=blocked)
        if self._deaf:
            return self._alone(board, mine, blocked or aside)
        try:
            board.publish(mine)
            verdict = board.heard() or self._look(board, mine)
            verdict = verdict or self._judge(board, mine, blocked, _as_it_is)
            verdict = verdict or self._judge(board, mine, aside, beside)
            return None if verdict is None else board.ring(verdict)
        except RuntimeError:  # the store is gone, and with it the process that holds it
            # Later, those who end because of it would be named too.
            self._deaf, self._ended = True, board.ended()
            return None

    def _alone(self, board: Noticeboard, mine: Status, blocked: _Blocked | None) -> Verdict | None:
        """Judge without the store: who holds it may have ended well, but not while others wait."""
        waits = blocked is not None and blocked.seconds > _LEFT_S
        if not waits and not self._lost:
            return None
        ended = sorted(self._ended or board.ended())
        who = "; ".join(
            f"rank {rank} ended, its process is gone; it was last in {board.last_of(rank)}"
            for rank in ended
        )
        what = "the job's store is gone, with the process that held it"
        text = f"{who or 'the rank that held the store (usually rank 0) is gone'}: {what}"
        return Verdict(tuple(ended) or (0,), f"{text}\n  {describe(mine)}")

    def _look(self, board: Noticeboard, mine: Status) -> Verdict | None:
        """Judge those of this host that died."""
        dead = board.dead()
        return judge(Scene(board.read() | {self.rank: mine}, dead), self.rank) if dead else None

    def _judge(
        self,
        board: Noticeboard,
        status: Status,
        blocked: _Blocked | None,
        view: Callable[[Status], Status],
    ) -> Verdict | None:
        """Judge those that this rank waits for, of whose statuses `view` is what matters."""
        if blocked is None or blocked.seconds < _LOOK_S:
            return None
        mine = view(status)

        def read(ranks: Sequence[int] | None = None) -> dict[int, Status]:
            return {rank: view(each) for rank, each in board.read(ranks).items()} | {
                self.rank: mine
            }

        near = read(self._some(mine.members))
        left = [rank for rank in absent(near, self.rank) if near[rank].state == "left"]
        silent = self._silent(near)
        if parting(near) is not None or silent or (left and blocked.seconds > _LEFT_S):
            return judge(Scene(read(), silent=silent), self.rank)
        if blocked.seconds < self.patience_s:
            return None
        everyone = read()
        verdict = judge(Scene(everyone, silent=self._silent(everyone)), self.rank)
        excused = any(everyone[rank].excuse_s > 0 for rank in verdict.culprits)
        return None if excused else verdict

    def _some(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the members to look at now: all of a small group, in turn those of a large one."""
        if len(members) <= _AT_ONCE:
            return members
        self._looks += 1
        first = (self.rank + self._looks * _AT_ONCE) % len(members)
        return (members + members)[first : first + _AT_ONCE]

    def _silent(self, statuses: dict[int, Status]) -> frozenset[int]:
        now, found = time.monotonic(), set()
        for rank, status in statuses.items():
            beat, since = self._heard.get(rank, (-1, now))
            if status.beat != beat:
                self._heard[rank] = (status.beat, now)
            elif now - since > self._silent_s and status.state == "runs" and rank != self.rank:
                found.add(rank)
        return frozenset(found)

    def _blocked(self) -> _Blocked | None:
        """Return what this rank waits in: the program itself, or its device."""
        now, waits = time.monotonic(), _waits(self.journal)
        if waits is not None:
            return waits
        # A device's queue: one thing in it is followed to its end, then the last one is.
        if self._queued is not None and _unfinished(self._queued[0]):
            return _Blocked(self._queued[0].entry, now - self._queued[1])
        flying = self.journal.flying
        self._queued = None if flying is None or not _unfinished(flying) else (flying, now)
        return None

    def _status(
        self, *, state: State = "runs", note: str = "", blocked: _Blocked | None = None
    ) -> Status:
        journal = self.journal
        assert self._board is not None, "there are others"
        entry = _at(journal, blocked)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        excuse, excuse_s = _excuse(journal)
        return msgspec.structs.replace(
            self._board.hello,
            beat=self._beat,
            state="lost" if self._lost and state == "runs" else state,
            note=note,
            at=None if entry is None else Seen.of(entry),
            waits_s=None if blocked is None else round(blocked.seconds, 3),
            members=() if entry is None else journal.members.get(entry.group, ()),
            lately=tuple(Seen.of(each) for each in list(journal.entries)[-_LATELY:]),
            counts=dict(journal.counts) | dict(self.aside.counts),
            doing=str(nearest(frame) or ""),
            excuse=excuse,
            excuse_s=excuse_s,
            aside=self._aside(),
        )

    def _aside(self) -> Aside | None:
        """Return what this rank does beside training, or else held up by its main thread."""
        journal = self.aside
        if not journal.members:
            return None
        blocked = _waits(journal)
        entry = _at(journal, blocked)
        excuse, excuse_s = _excuse(journal if journal.excuse[0] else self.journal)
        return Aside(
            at=None if entry is None else Seen.of(entry),
            waits_s=None if blocked is None else round(blocked.seconds, 3),
            members=() if entry is None else journal.members.get(entry.group, ()),
            excuse=excuse,
            excuse_s=excuse_s,
        )

    def _end(self, verdict: Verdict) -> None:
        """End this process, whatever it is blocked in."""
        words = shown = f"meshwright: rank {self.rank} ends: {verdict.text}\n"
        if self._folder is not None:
            with contextlib.suppress(OSError):
                kept = self._folder / f"alarm-{self.rank:05d}.txt"
                kept.write_text(words)
                head = words.partition("\n")[0]
                shown = f"{head}\n  what every rank did then is in {kept}\n"
        if not told(self.rank, verdict.culprits, verdict.text):
            with contextlib.suppress(OSError):
                os.write(2, shown.encode())
        if self.journal.recorder is not None:
            self.journal.recorder.close_within(_CLOSING_S)
        if self._board is not None:
            self._board.close(self.journal)
        os._exit(EXIT_CODE)


def _as_it_is(status: Status) -> Status:
    return status


def _waits(journal: Journal) -> _Blocked | None:
    """Return what the program waits in, as a journal says."""
    waits = journal.waits
    return None if waits is None else _Blocked(waits.entry, time.monotonic() - waits.since_s)


def _at(journal: Journal, blocked: _Blocked | None) -> Entry | None:
    """Return what a journal's rank is in, or was last in."""
    entry = blocked.entry if blocked is not None else journal.failed
    return journal.entries[-1] if entry is None and journal.entries else entry


def _excuse(journal: Journal) -> tuple[str, float]:
    """Return what a rank announced, and for how much longer it may take."""
    what, until = journal.excuse
    return what, max(0.0, until - time.monotonic()) if what else 0.0


def _unfinished(flying: Flying) -> bool:
    return any(not work.is_completed() for work in flying.works)
