"""`StallMonitor`: decides when a collective has stood still for too long.

While anybody makes progress, nobody gives up. A dead process, or somebody who gave up, ends the
wait at once.
"""

import threading
import time
from collections.abc import Callable

from meshwright.run.parallel.collective.progress_table import (
    DONE,
    HEARTBEAT,
    SEQUENCE,
    PlanPosition,
    ProgressState,
    ProgressTable,
    RankProgress,
    is_alive,
)
from meshwright.run.parallel.collective.stall_diagnosis import (
    CollectiveStall,
    StallSnapshot,
    diagnose_stall,
)

TICK_S = 0.1
"""How often a waiting rank looks around."""
_SETTLE_S = 0.3
"""How long what gave up or died may still deliver what it sent before."""
_SILENT_S = 1.2
"""A rank that waits and has not looked around for so long is stopped, or out of reach."""


class StallMonitor:
    """Looks at the ledger for one rank of a team."""

    def __init__(self, ledger: ProgressTable, rank: int, timeout_s: float) -> None:
        self._ledger, self._rank, self._timeout_s = ledger, rank, timeout_s
        self._spot: Callable[[int, int], PlanPosition] | None = None
        self._seen: tuple[tuple[int, int], ...] = ()
        self._since = self._broken_since = self._own_since = 0.0
        self._own = (0, 0)

    def start(self, spot: Callable[[int, int], PlanPosition]) -> None:
        """Begin to watch a collective, whose tasks `spot` names."""
        self._spot, self._seen, self._broken_since = spot, (), 0.0
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop watching."""
        self._spot = None

    def check(self) -> CollectiveStall | None:
        """Return what holds up the collective, once that is clear; None while there is hope."""
        ledger, spot = self._ledger, self._spot
        if spot is None:
            return None
        now = time.monotonic()
        ledger.own_row[HEARTBEAT] = time.monotonic_ns()
        ledger.publish()
        if not ledger.is_single_host and self._moves(now):
            return None  # spare the store: nobody holds this rank up
        entries = ledger.read()
        seen = tuple((entry.sequence, entry.tasks_done) for entry in entries)
        if seen != self._seen or entries[self._rank].waiting_for is None:  # it works
            self._seen, self._since = seen, now
        if not self._hopeless(entries):
            self._broken_since = 0.0
        elif not self._broken_since:
            self._broken_since = now
        broken = self._broken_since and now - self._broken_since > _SETTLE_S
        if entries[self._rank].waiting_for is None:
            return None
        if not broken and now - self._since < self._timeout_s:
            return None
        return self._diagnosis(entries, spot)

    def _moves(self, now: float) -> bool:
        """Whether this rank itself has done something not long ago."""
        row = self._ledger.own_row
        state = row[SEQUENCE], row[DONE]
        if state != self._own:
            self._own, self._own_since = state, now
        return now - self._own_since < _SILENT_S

    def diagnose(self) -> CollectiveStall | None:
        """Return what holds up the collective, as far as is known now."""
        if self._spot is None:
            return None
        self._ledger.publish(at_once=True)
        return self._diagnosis(self._ledger.read(), self._spot)

    @property
    def settle_time_s(self) -> float:
        """How long to wait until the end of another rank can be seen in the ledger."""
        return _SETTLE_S if self._ledger.is_single_host else 2 * _SILENT_S

    def _hopeless(self, entries: list[RankProgress]) -> bool:
        """Whether somebody is dead, gave up, or runs another collective."""
        mine = entries[self._rank]
        unfinished = {
            rank
            for rank, entry in enumerate(entries)
            if entry.sequence < mine.sequence
            or (entry.sequence == mine.sequence and entry.state is not ProgressState.NOT_ENTERED)
        }
        if self._dead(entries) & unfinished:
            return True
        return any(
            (entry.state is ProgressState.ABORTED and entry.sequence <= mine.sequence)
            or (entry.sequence == mine.sequence and entry.signature != mine.signature)
            for entry in entries
        )

    def _dead(self, entries: list[RankProgress]) -> frozenset[int]:
        if not self._ledger.is_single_host:
            return frozenset()
        return frozenset(rank for rank, entry in enumerate(entries) if not is_alive(entry))

    def _diagnosis(
        self, entries: list[RankProgress], spot: Callable[[int, int], PlanPosition]
    ) -> CollectiveStall:
        now_ns = time.monotonic_ns()
        silent = frozenset(
            rank
            for rank, entry in enumerate(entries)
            if entry.waiting_for is not None and now_ns - entry.heartbeat_ns > _SILENT_S * 1e9
        )
        dead = self._dead(entries)
        return diagnose_stall(
            StallSnapshot(self._rank, entries, dead, silent, spot, self._timeout_s)
        )


class StallMonitorThread:
    """Keeps watch beside a rank that is blocked in a library, and frees it when all is lost."""

    def __init__(self, watch: StallMonitor, free: Callable[[], None]) -> None:
        self._watch, self._free = watch, free
        self._over = False
        self._busy = threading.Lock()
        self.stall: CollectiveStall | None = None
        self._thread = threading.Thread(target=self._run, name="collective watch", daemon=True)
        self._thread.start()

    def start(self, spot: Callable[[int, int], PlanPosition]) -> None:
        """Watch over a collective."""
        with self._busy:
            self.stall = None
            self._watch.start(spot)

    def stop(self) -> None:
        """Rest."""
        with self._busy:
            self._watch.stop()

    def diagnosis(self) -> CollectiveStall | None:
        """Return why a message failed: what the watch found, or what is to be seen now."""
        # Who closed the connection has written down why, or is dead in a moment.
        time.sleep(self._watch.settle_time_s)
        with self._busy:
            return self.stall or self._watch.diagnose()

    def close(self) -> None:
        """End the thread."""
        self._over = True

    def _run(self) -> None:
        # Never woken: a thread that wakes with each collective competes for the interpreter.
        while not self._over:
            time.sleep(TICK_S)
            with self._busy:
                stall = self._watch.check()
                if stall is None or self.stall is not None:
                    continue
                self.stall = stall
            self._free()
