"""`Watcher`: looks at a running job a few times a second and does what the rules say."""

import os
import time
from collections import deque
from contextlib import suppress

from msgspec.structs import replace

from meshwright.observe.watch.agent.faults import Log
from meshwright.observe.watch.agent.pages import ENDED, FAILED
from meshwright.observe.watch.asking import Asked, Asking
from meshwright.observe.watch.captures import ROUTINE, SLOWDOWN, Captures, Judged, Wanted
from meshwright.observe.watch.duty import (
    Spending,
    affordable,
    expected_cost_s,
    may_borrow,
    next_step,
    stride,
)
from meshwright.observe.watch.errands import Errands, Found
from meshwright.observe.watch.folder import Folder, remove
from meshwright.observe.watch.gpus import Gpus
from meshwright.observe.watch.hardware import changes, summary
from meshwright.observe.watch.pace import Pace, Rise, usual
from meshwright.observe.watch.processes import Process, Processes, is_alive, usual_step_s
from meshwright.observe.watch.rank_status import MOST_TIMES, notes, rank_status
from meshwright.observe.watch.sampler import Sampler
from meshwright.observe.watch.settings import Settings
from meshwright.observe.watch.stall import limit_s
from meshwright.observe.watch.standstill import Gathered, gather
from meshwright.observe.watch.status import (
    SlowdownStatus,
    StallStatus,
    Status,
    write_status,
)
from meshwright.observe.watch.steps import StepReader

TICK_S = 0.5
STATUS_S = 2.0
AHEAD_S = 0.6
"""A capture is asked for this long ahead, so that every rank hears of it before its step."""
_FEWEST_STEPS = 3
"""Before these there is no pace."""
MOST_EVENTS = 100
COSTS = 16
LAST_ERRANDS_S = 60.0
MOST_ERRANDS = 2
"""Captures that wait to be judged at most: they come no faster than they are looked at."""


class Watcher:
    """The state of one watch."""

    def __init__(self, folder: Folder, settings: Settings, command: str, gpus: Gpus | None) -> None:
        self._folder, self._settings, self._command = folder, settings, command
        self._log = Log(str(folder.log))
        self._asking = Asking(folder)
        self._processes = Processes(folder)
        self._captures = Captures(folder, settings.keep, settings.keep_bytes)
        self._errands = Errands(self._log)
        self._sampler = Sampler(folder, gpus)
        self._pace = Pace(settings.slowdown)
        self._followed: StepReader | None = None
        self._job = 0
        self._since_s, self._began_ns = time.time(), time.monotonic_ns()
        self._costs_s: deque[float] = deque(maxlen=COSTS)
        self._slowdowns: list[SlowdownStatus] = []
        self._wanted: list[int] = []
        """Slowdowns, by their place, that have no capture yet."""
        self._stalls: list[StallStatus] = []
        self._stall_since_ns: int | None = None
        self._deaths: list[str] = []
        self._taken = self._refused = 0
        self._told_ns = 0
        self._code: int | None = None

    def started(self, job: int) -> None:
        """The job runs."""
        self._job = job
        try:
            # What the watcher does can wait; what the job does cannot.
            os.setpriority(os.PRIO_PROCESS, 0, 10)
            self._write()
        except OSError:
            self._log.fault("the start could not be written down")

    def tick(self) -> None:
        """Look once; whatever goes wrong here is the watch's own affair."""
        try:
            self._look()
        except Exception:  # noqa: BLE001 - the job goes on, and is looked at again
            self._log.fault("a look failed")

    def ended(self, code: int) -> Status:
        """The job has ended: take in what is left, and sum up."""
        self._code = code
        try:
            self._look()
            asked = self._asking.open
            if asked is not None:
                self._asking.open = None
                self._take_in(asked)
            self._write()  # Schedulers kill half a minute after they asked to end.
            with suppress(KeyboardInterrupt):
                self._errands.finish(LAST_ERRANDS_S)
            for pipe in (*self._folder.agents.glob("*.ask"), *self._folder.flight.glob("*.pipe")):
                remove(pipe)
        except Exception:  # noqa: BLE001 - the exit code must reach whoever waits for it
            self._log.fault("the end could not be looked at")
        status = self.status()
        try:
            write_status(self._folder.status, status)
        except OSError:
            self._log.fault("the end could not be written down")
        return status

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        self._processes.look()
        self._errands.tell()
        self._bury()
        ranks = self._processes.stepping()
        self._sampler.tick([one.said.pid for one in ranks if not one.gone])
        self._follow(ranks)
        asked = self._asking.done(ranks, now_ns)
        if asked is not None:
            self._take_in(asked)
        if self._code is None:
            self._ask([one for one in ranks if not one.gone], now_ns)
            self._mind_stalls(ranks, now_ns)
        if now_ns - self._told_ns > 1e9 * STATUS_S:
            self._told_ns = now_ns
            self._write()

    def _write(self) -> None:
        write_status(self._folder.status, self.status())

    def _bury(self) -> None:
        """Take note of processes that are gone."""
        for process in self._processes.all.values():
            if process.gone or is_alive(process.said.pid):
                continue
            process.gone = True
            if process.steps is None or len(self._deaths) >= MOST_EVENTS:
                continue
            head = process.steps.head()
            who = f"rank {process.rank} after step {head.num_steps}"
            if not head.state & ENDED:
                self._deaths.append(f"{who}: ended from outside (a signal, or os._exit)")
            elif head.state & FAILED:
                self._deaths.append(f"{who}: an exception that nothing caught")

    def _follow(self, ranks: list[Process]) -> None:
        """Watch the pace of the first rank: ranks that exchange gradients step together."""
        reader = ranks[0].steps if ranks else None
        if reader is None:
            return
        if reader is not self._followed:  # a job that was started again counts its steps anew
            self._followed, self._pace = reader, Pace(self._settings.slowdown)
        over = self._pace.recovered(reader)
        if over is not None and self._slowdowns:
            self._slowdowns[-1] = replace(self._slowdowns[-1], until_step=over)
        rise = self._pace.look(reader)
        if rise is None or len(self._slowdowns) >= MOST_EVENTS:
            return
        self._wanted.append(len(self._slowdowns))
        self._slowdowns.append(
            SlowdownStatus(
                step=rise.step,
                before_ms=1e3 * rise.before_s,
                after_ms=1e3 * rise.after_s,
                what=self._hardware(rise),
            )
        )

    def _hardware(self, rise: Rise) -> tuple[str, ...]:
        """What changed in the hardware around a rise, which is `NEWEST` steps or blocks old."""
        now_s = time.time()
        ago_s = max(3.0, 8 * rise.after_s)
        before = self._sampler.between(now_s - ago_s - 60, now_s - ago_s)
        return changes(before, self._sampler.between(now_s - ago_s, now_s))

    def _spending(self, ranks: list[Process], now_ns: int) -> Spending | None:
        readers = [one.steps for one in ranks if one.steps is not None]
        if not readers or readers[0].head().num_steps < _FEWEST_STEPS:
            return None
        worst = max((one.head() for one in readers), key=lambda head: head.spent_ns)
        return Spending(
            (now_ns - worst.started_ns) / 1e9,
            worst.spent_ns / 1e9,
            expected_cost_s(list(self._costs_s)),
            readers[0].pace_s(now_ns),
        )

    def _ask(self, ranks: list[Process], now_ns: int) -> None:
        """Ask for a capture where one is due."""
        spending = self._spending(ranks, now_ns)
        stands = self._stall_since_ns is not None
        busy = self._asking.open is not None or self._errands.num_open >= MOST_ERRANDS
        if spending is None or busy or stands:
            return
        newest = max(one.num_steps for one in ranks)
        ahead = 2 + int(AHEAD_S / max(spending.step_s, 1e-6))
        settings = self._settings
        if self._wanted and (settings.every or may_borrow(spending, settings.budget)):
            step, num_steps, why = newest + ahead, settings.triggered_steps, SLOWDOWN
        else:
            every = settings.every or stride(spending, settings.budget)
            step, num_steps, why = next_step(newest + ahead, every), 1, ROUTINE
            far = step - newest > 2 * ahead + 2
            if far or not (settings.every or affordable(spending, settings.budget)):
                return
        wait_s = spending.step_s * (step - newest + num_steps)
        self._asking.ask(step, num_steps, why, now_ns=now_ns, wait_s=wait_s)

    def _take_in(self, asked: Asked) -> None:
        ranks = self._processes.stepping()
        files = self._asking.written(asked, ranks)
        place = self._wanted.pop(0) if asked.why == SLOWDOWN and self._wanted else None
        if not files:
            self._refused += 1
            return
        self._taken += 1
        heads = [one.steps.head() for one in ranks if one.steps is not None]
        costs = [head.cost_ns / 1e9 for head in heads if head.answered == asked.number]
        self._costs_s.append(max(costs, default=0.0))
        since = self._slowdowns[place].step if place is not None else None
        wanted = Wanted(asked.number, asked.step, asked.num_steps, since)

        def errand() -> Found:
            judged = self._captures.take(wanted, files)
            return lambda: self._judged(judged, place)

        self._errands.send(errand)

    def _judged(self, judged: Judged, place: int | None) -> None:
        if place is None or judged.status is None:
            return
        old = self._slowdowns[place]
        self._slowdowns[place] = replace(
            old,
            capture=judged.status.folder,
            reference=judged.reference,
            what=(*judged.what, *old.what),
            finding=judged.finding,
        )

    def _mind_stalls(self, ranks: list[Process], now_ns: int) -> None:
        ends = [one.steps.last_ns() for one in ranks if one.steps is not None]
        last_ns = max((end for end in ends if end is not None), default=self._began_ns)
        if self._stall_since_ns is not None:
            if last_ns > self._stall_since_ns:
                after_s = (last_ns - self._stall_since_ns) / 1e9
                self._stall_since_ns = None
                if self._stalls:
                    self._stalls[-1] = replace(self._stalls[-1], went_on_after_s=after_s)
            return
        waited_s = (now_ns - last_ns) / 1e9
        step_s = usual_step_s(ranks)
        to_ask = self._processes.to_ask()
        if waited_s < limit_s(self._settings.patience_s, step_s) or not to_ask:
            return
        self._stall_since_ns = last_ns
        if len(self._stalls) >= MOST_EVENTS:
            return
        step = max((one.num_steps for one in ranks), default=0)
        place = len(self._stalls)
        name = f"{place + 1:03d}-step-{step}"
        self._stalls.append(StallStatus(step=step, after_s=waited_s))

        def errand() -> Found:
            gathered = gather(self._folder, to_ask, name)
            return lambda: self._gathered(place, gathered)

        self._errands.send(errand)

    def _gathered(self, place: int, gathered: Gathered) -> None:
        self._stalls[place] = replace(
            self._stalls[place],
            folder=gathered.folder,
            places=gathered.places,
            verdict=gathered.verdict,
            dumps=gathered.num_dumps,
        )
        self._write()

    def status(self) -> Status:
        """Sum up what is known."""
        ranks = self._processes.stepping()
        now_ns = time.monotonic_ns()
        spending = self._spending(ranks, now_ns)
        reader = ranks[0].steps if ranks else None
        figures = usual(reader.times(MOST_TIMES).step_s) if reader is not None else None
        rows = tuple(rank_status(one) for one in ranks)
        every = self._settings.every
        if every is None and spending is not None:
            every = stride(spending, self._settings.budget)
        return Status(
            command=self._command,
            watcher=os.getpid(),
            job=self._job,
            code=self._code,
            since_s=self._since_s,
            elapsed_s=(now_ns - self._began_ns) / 1e9,
            processes=len(self._processes.all),
            steps=max((one.num_steps for one in ranks), default=0),
            step_ms=1e3 * figures.middle_s if figures else None,
            variation=figures.variation if figures else None,
            slowest_ms=1e3 * figures.slowest_s if figures else None,
            overhead=max((row.overhead for row in rows), default=0.0),
            budget=self._settings.budget,
            stride=every,
            as_asked=self._settings.every is not None,
            ranks=rows,
            captures=tuple(one for _, one in sorted(dict(self._captures.kept).items())),
            taken=self._taken,
            dropped=self._captures.num_dropped,
            refused=self._refused,
            costs_ms=tuple(1e3 * cost_s for cost_s in self._costs_s),
            slowdowns=tuple(self._slowdowns),
            stalls=tuple(self._stalls),
            deaths=tuple(self._deaths),
            hardware=summary(list(self._sampler.samples)),
            faults=self._folder.log.exists(),
            notes=tuple(notes(ranks)),
        )
