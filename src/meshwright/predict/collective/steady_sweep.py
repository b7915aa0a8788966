"""Regular sweeps: the steps of a ring, carried out until each takes as long as the one before.

In such a sweep every row sends to the same peer in every step and slots move on by one, so a row
waits for the same other rows every time, a fixed number of steps (the lag) earlier. Once all rows
begin a constant time later than in the step before, for as many steps as the longest lag, nothing
can change that any more: the steps that are left are added up at once. That is exact.

How long moves take where they share links is looked at in the first steps and in every 64th from
then on, and kept in between.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.collective import Collective, Sweep
from meshwright.predict.collective.sim_network import Floats, Longs
from meshwright.predict.collective.slot_times import SlotRows, SweepSlotTimes

if TYPE_CHECKING:
    from meshwright.predict.collective.step_runner import CollectiveRun

MAX_STEPPED_MOVES = 20_000
"""Moves up to which a sweep is carried out step by step all the same."""
WARMUP_STEPS = 24
"""Steps in which links are looked at every time."""
LINK_CHECK_INTERVAL = 64
"""Steps from one look at the links to the next."""
MAX_KEPT_TIMES = 16_000_000
"""Times of a sweep that are kept, for the sweeps after it."""
_EVEN = 1e-7
"""Differences of times that count as none, relative to one step."""


class RowDependency(NamedTuple):
    """Rows that wait for other rows of `lag` steps ago."""

    lag: int
    row: Longs | None
    """None: every row, once, in order."""
    source_row: Longs


def is_regular(sweep: Sweep, collective: Collective) -> bool:
    """Say whether a sweep is regular, and long enough to care."""
    shift, moves = sweep.shift, sweep.moves
    if len(moves) * sweep.span < MAX_STEPPED_MOVES or shift.dst or shift.src_slot != shift.dst_slot:
        return False
    if abs(shift.src_slot) != 1 or not sweep.span <= shift.slot_wrap:
        return False
    alike = bool((moves.phase == 0).all() and (moves.count == 1).all())
    return alike and bool((moves.dst < collective.ranks).all())


def simulate_regular_sweep(run: "CollectiveRun", sweep: Sweep) -> None:
    """Advance the clock of a run by a whole sweep."""
    _Repeating(run, sweep).go()


class _Repeating:
    """A regular sweep while it is being carried out."""

    def __init__(self, run: "CollectiveRun", sweep: Sweep) -> None:
        self.run, self.sweep, moves = run, sweep, sweep.moves
        slots = run.slot_times.slots
        self.readers = SlotRows(sweep, _long(moves.src), _long(moves.src_slot), slots)
        self.writers = SlotRows(sweep, _long(moves.dst), _long(moves.dst_slot), slots)
        self.waits = _Waits(self.readers, self.writers)
        self.legs = run.find_routes(moves)
        kept = max(self.waits.longest + 2, MAX_KEPT_TIMES // len(moves))
        self.pace = _Pace(len(moves), min(sweep.span, kept))
        self.before_s = float(run.finish_s.max(initial=0.0))
        self.fresh = self.before_s > 0
        """Whether what earlier sweeps left behind can still hold somebody up."""
        self.delayed: dict[int, Floats] = {}
        self.takes_s = np.zeros(len(moves))
        """How long each move took when that was last looked at."""
        self.unsettled = 0
        """Steps since then."""

    def go(self) -> None:
        """Carry out the steps until they are even, and add up the rest."""
        waits, pace, legs, span = self.waits, self.pace, self.legs, self.sweep.span
        for step in range(span):
            ready = waits.ready_s(pace, legs.latency_s, self.delayed, step)
            was_even = pace.even > waits.longest
            if self.fresh or step < WARMUP_STEPS or step % LINK_CHECK_INTERVAL == 0 or was_even:
                self._settle(step)
                sent, free = self._look(step, ready)
            else:
                sent, free = np.maximum(ready, pace.at(step - 1)) + self.takes_s, None
                self.unsettled += 1
            if free is not None or waits.delays:
                done = waits.done_s(pace, sent + legs.latency_s, self.delayed, step)
                self.delayed[step] = done if free is None else np.maximum(done, free)
            pace.add(step, sent)
            if was_even and pace.even > waits.longest and not (self.fresh or waits.delays):
                break
        self._end(step)

    def _look(self, step: int, ready: Floats) -> tuple[Floats, Floats | None]:
        """Let a step contend for its links; return when its moves left, and slots were free."""
        run, legs, free = self.run, self.legs, None
        if self.fresh:
            now = self.sweep.get_moves(step)
            ready = np.maximum(ready, run.slot_times.ready_s(_long(now.src), _long(now.src_slot)))
            free = run.slot_times.free_s(_long(now.dst), _long(now.dst_slot))
        start, sent = run.send(legs, ready)
        self.takes_s = sent - start
        self.fresh = self.fresh and bool(start.min() <= self.before_s)
        return sent, free

    def _settle(self, step: int) -> None:
        """Bring lanes and links up to date with the steps that were not looked at."""
        if self.unsettled:
            sent = self.pace.at(step - 1)
            self.run.occupy_connections(self.legs, sent)
            self.run.link_clocks.advance_repeats(self.legs.link_moves, self.unsettled, sent)
            self.unsettled = 0

    def _end(self, step: int) -> None:
        run, pace, moves = self.run, self.pace, self.sweep.moves
        self._settle(step + 1)
        left = self.sweep.span - 1 - step
        sent = pace.at(step) + left * pace.seconds
        run.occupy_connections(self.legs, sent)
        run.link_clocks.advance_repeats(self.legs.link_moves, left, sent)
        arrived = sent + self.legs.latency_s
        run.record_finish(moves, sent, np.maximum(arrived, self.delayed.get(step, arrived)))
        record = SweepSlotTimes(
            self.readers,
            self.writers,
            latency_s=self.legs.latency_s,
            sent_s=pace.kept,
            delayed_s=self.delayed,
            steps=range(pace.first(step), step + 1),
            pace_s=pace.seconds,
        )
        run.slot_times.records.append(record)


def _long(column: NDArray[np.int32]) -> Longs:
    return column.astype(np.int64)


class _Pace:
    """The times of the steps so far, and whether they have become even."""

    def __init__(self, rows: int, steps: int) -> None:
        self.kept = np.empty((steps, rows))
        self.even = 0
        self.seconds = 0.0
        """From one step to the next."""

    def add(self, step: int, sent_s: Floats) -> None:
        """Note when the moves of a step left."""
        self.kept[step % len(self.kept)] = sent_s
        if step and len(self.kept) > 1:
            before = self.at(step - 1)
            self.seconds = float(sent_s[0] - before[0])
            middle = len(sent_s) // 2
            off = abs(float(sent_s[middle] - before[middle]) - self.seconds)
            if off <= _EVEN * self.seconds:
                off = float(np.abs(sent_s - before - self.seconds).max())
            self.even = self.even + 1 if off <= _EVEN * self.seconds else 0

    def at(self, step: int) -> Floats:
        """Return the times of one of the last steps."""
        found: Floats = self.kept[step % len(self.kept)]
        return found

    def first(self, step: int) -> int:
        """Return the oldest step that is kept once `step` has been."""
        return max(0, step + 1 - len(self.kept))


class _Waits:
    """Which rows wait for which others: for values, for slots that are written or read."""

    def __init__(self, readers: SlotRows, writers: SlotRows) -> None:
        self.values = _waits(readers, writers)
        self.rewrites, self.overwrites = _waits(writers, writers), _waits(writers, readers)
        every = (*self.values, *self.rewrites, *self.overwrites)
        self.longest = max((wait.lag for wait in every), default=0)
        self.rows = len(readers.key)
        self.delays = bool(self.rewrites or self.overwrites)

    def ready_s(
        self, pace: "_Pace", latency_s: Floats, delayed: dict[int, Floats], step: int
    ) -> Floats:
        """Return since when the values that a step sends are there, by this sweep's doing."""
        times = np.zeros(self.rows)
        for lag, row, other in self.values:
            if step >= lag:
                past = delayed.get(step - lag)
                past = pace.at(step - lag) + latency_s if past is None else past
                times = _later(times, row, past[other])
        return times

    def done_s(
        self, pace: "_Pace", arrived_s: Floats, delayed: dict[int, Floats], step: int
    ) -> Floats:
        """Return when what arrived lies in its slots."""
        for lag, row, other in self.rewrites:
            if step >= lag:
                arrived_s = _later(arrived_s, row, delayed[step - lag][other])
        for lag, row, other in self.overwrites:
            if step >= lag:
                arrived_s = _later(arrived_s, row, pace.at(step - lag)[other])
        return arrived_s


def _later(times: Floats, row: Longs | None, others: Floats) -> Floats:
    if row is None:
        return np.maximum(times, others)
    np.maximum.at(times, row, others)
    return times


def _waits(rows: SlotRows, others: SlotRows) -> list[RowDependency]:
    """Return which rows touch a slot that other rows touched earlier in the sweep, by lag."""
    row, other = others.find_conflicts(rows.key)
    lag = -rows.turn * (rows.start[row] - others.start[other]) % rows.wrap
    lag = np.where(lag == 0, rows.wrap, lag)
    near = lag < rows.span
    row, other, lag = row[near], other[near], lag[near]
    found = []
    for one in np.unique(lag).tolist():
        some, whom = row[lag == one], other[lag == one]
        whole = np.array_equal(some, np.arange(len(rows.key)))
        found.append(RowDependency(one, None if whole else some, whom))
    return found
