"""`Watcher`: looks at a running job a few times a second and does what the rules say."""

import os
import time
from collections import deque
from contextlib import suppress

from msgspec.structs import replace

from meshwright.observe.hardware.hardware_sample import describe_changes, summarize_samples
from meshwright.observe.hardware.nvml import NvmlDevices
from meshwright.observe.watch.agent.error_log import ErrorLog
from meshwright.observe.watch.agent.shared_pages import ENDED, FAILED
from meshwright.observe.watch.background_worker import BackgroundWorker, ResultCallback
from meshwright.observe.watch.capture_requester import CaptureRequester, PendingCapture
from meshwright.observe.watch.capture_store import (
    ROUTINE,
    SLOWDOWN,
    CaptureAssessment,
    CaptureRequest,
    CaptureStore,
)
from meshwright.observe.watch.hang_report import (
    HangReport,
    collect_hang_report,
    compute_hang_timeout_s,
)
from meshwright.observe.watch.hardware_log import HardwareLog
from meshwright.observe.watch.overhead_budget import (
    WatchOverhead,
    choose_capture_interval,
    estimate_capture_cost_s,
    find_next_capture_step,
    is_affordable,
    may_overdraw,
)
from meshwright.observe.watch.process_table import (
    ProcessTable,
    WatchedProcess,
    compute_median_step_s,
    is_alive,
)
from meshwright.observe.watch.step_pace import StepPace, StepTimeRise, summarize_step_times
from meshwright.observe.watch.step_page_reader import StepPageReader
from meshwright.observe.watch.watch_config import WatchConfig
from meshwright.observe.watch.watch_folder import WatchFolder, remove_path
from meshwright.observe.watch.watch_status import (
    MAX_TIMES,
    HangStatus,
    SlowdownStatus,
    WatchStatus,
    collect_notes,
    summarize_process,
    write_status,
)

TICK_S = 0.5
STATUS_S = 2.0
REQUEST_LEAD_S = 0.6
"""A capture is asked for this long ahead, so that every rank hears of it before its step."""
_FEWEST_STEPS = 3
"""Before these there is no pace."""
MAX_EVENTS = 100
MAX_RECENT_COSTS = 16
DRAIN_TIMEOUT_S = 60.0
MAX_PENDING_TASKS = 2
"""Captures that wait to be judged at most: they come no faster than they are looked at."""


class Watcher:
    """The state of one watch."""

    def __init__(
        self, folder: WatchFolder, settings: WatchConfig, command: str, gpus: NvmlDevices | None
    ) -> None:
        self._folder, self._settings, self._command = folder, settings, command
        self._log = ErrorLog(str(folder.log))
        self._asking = CaptureRequester(folder)
        self._processes = ProcessTable(folder)
        self._captures = CaptureStore(folder, settings.max_captures, settings.max_capture_bytes)
        self._errands = BackgroundWorker(self._log)
        self._sampler = HardwareLog(folder, gpus)
        self._pace = StepPace(settings.slowdown_threshold)
        self._followed: StepPageReader | None = None
        self._job = 0
        self._since_s, self._began_ns = time.time(), time.monotonic_ns()
        self._costs_s: deque[float] = deque(maxlen=MAX_RECENT_COSTS)
        self._slowdowns: list[SlowdownStatus] = []
        self._wanted: list[int] = []
        """Slowdowns, by their place, that have no capture yet."""
        self._hangs: list[HangStatus] = []
        self._hang_since_ns: int | None = None
        self._deaths: list[str] = []
        self._taken = self._refused = 0
        self._told_ns = 0
        self._code: int | None = None

    def on_job_start(self, job: int) -> None:
        """The job runs."""
        self._job = job
        try:
            # What the watcher does can wait; what the job does cannot.
            os.setpriority(os.PRIO_PROCESS, 0, 10)
            self._write()
        except OSError:
            self._log.write("cannot write status")

    def tick(self) -> None:
        """Look once; whatever goes wrong here is the watch's own affair."""
        try:
            self._look()
        except Exception:  # noqa: BLE001 - the job goes on, and is looked at again
            self._log.write("watch iteration failed")

    def on_job_exit(self, code: int) -> WatchStatus:
        """The job has ended: take in what is left, and sum up."""
        self._code = code
        try:
            self._look()
            asked = self._asking.pending
            if asked is not None:
                self._asking.pending = None
                self._take_in(asked)
            self._write()  # Schedulers kill half a minute after they asked to end.
            with suppress(KeyboardInterrupt):
                self._errands.drain(DRAIN_TIMEOUT_S)
            for pipe in (
                *self._folder.agents.glob("*.ask"),
                *self._folder.flight_recorder.glob("*.pipe"),
            ):
                remove_path(pipe)
        except Exception:  # noqa: BLE001 - the exit code must reach whoever waits for it
            self._log.write("watch iteration failed")
        status = self.build_status()
        try:
            write_status(self._folder.status, status)
        except OSError:
            self._log.write("cannot write status")
        return status

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        self._processes.refresh()
        self._errands.deliver_results()
        self._bury()
        ranks = self._processes.list_stepping_processes()
        self._sampler.sample([one.announcement.pid for one in ranks if not one.is_gone])
        self._follow(ranks)
        asked = self._asking.poll(ranks, now_ns)
        if asked is not None:
            self._take_in(asked)
        if self._code is None:
            self._ask([one for one in ranks if not one.is_gone], now_ns)
            self._check_hangs(ranks, now_ns)
        if now_ns - self._told_ns > 1e9 * STATUS_S:
            self._told_ns = now_ns
            self._write()

    def _write(self) -> None:
        write_status(self._folder.status, self.build_status())

    def _bury(self) -> None:
        """Take note of processes that are gone."""
        for process in self._processes.processes.values():
            if process.is_gone or is_alive(process.announcement.pid):
                continue
            process.is_gone = True
            if process.steps is None or len(self._deaths) >= MAX_EVENTS:
                continue
            head = process.steps.read_header()
            who = f"rank {process.rank} after step {head.num_steps}"
            if not head.state & ENDED:
                self._deaths.append(f"{who}: killed by a signal or os._exit")
            elif head.state & FAILED:
                self._deaths.append(f"{who}: uncaught exception")

    def _follow(self, ranks: list[WatchedProcess]) -> None:
        """Watch the pace of the first rank: ranks that exchange gradients step together."""
        reader = ranks[0].steps if ranks else None
        if reader is None:
            return
        if reader is not self._followed:  # a job that was started again counts its steps anew
            self._followed, self._pace = reader, StepPace(self._settings.slowdown_threshold)
        over = self._pace.find_recovery(reader)
        if over is not None and self._slowdowns:
            self._slowdowns[-1] = replace(self._slowdowns[-1], until_step=over)
        rise = self._pace.check(reader)
        if rise is None or len(self._slowdowns) >= MAX_EVENTS:
            return
        self._wanted.append(len(self._slowdowns))
        self._slowdowns.append(
            SlowdownStatus(
                step=rise.step,
                before_ms=1e3 * rise.before_s,
                after_ms=1e3 * rise.after_s,
                changes=self._hardware(rise),
            )
        )

    def _hardware(self, rise: StepTimeRise) -> tuple[str, ...]:
        """Return what changed in the hardware around a rise.

        The rise is `NUM_NEWEST_TIMES` steps or blocks old.
        """
        now_s = time.time()
        ago_s = max(3.0, 8 * rise.after_s)
        before = self._sampler.select_between(now_s - ago_s - 60, now_s - ago_s)
        return describe_changes(before, self._sampler.select_between(now_s - ago_s, now_s))

    def _spending(self, ranks: list[WatchedProcess], now_ns: int) -> WatchOverhead | None:
        readers = [one.steps for one in ranks if one.steps is not None]
        if not readers or readers[0].read_header().num_steps < _FEWEST_STEPS:
            return None
        worst = max((one.read_header() for one in readers), key=lambda head: head.overhead_ns)
        return WatchOverhead(
            (now_ns - worst.started_ns) / 1e9,
            worst.overhead_ns / 1e9,
            estimate_capture_cost_s(list(self._costs_s)),
            readers[0].measure_recent_step_s(now_ns),
        )

    def _ask(self, ranks: list[WatchedProcess], now_ns: int) -> None:
        """Ask for a capture where one is due."""
        spending = self._spending(ranks, now_ns)
        stands = self._hang_since_ns is not None
        busy = self._asking.pending is not None or self._errands.num_pending >= MAX_PENDING_TASKS
        if spending is None or busy or stands:
            return
        newest = max(one.num_steps for one in ranks)
        ahead = 2 + int(REQUEST_LEAD_S / max(spending.step_s, 1e-6))
        settings = self._settings
        if self._wanted and (
            settings.capture_interval or may_overdraw(spending, settings.max_overhead)
        ):
            step, num_steps, why = newest + ahead, settings.slowdown_capture_steps, SLOWDOWN
        else:
            every = settings.capture_interval or choose_capture_interval(
                spending, settings.max_overhead
            )
            step, num_steps, why = find_next_capture_step(newest + ahead, every), 1, ROUTINE
            far = step - newest > 2 * ahead + 2
            if far or not (
                settings.capture_interval or is_affordable(spending, settings.max_overhead)
            ):
                return
        wait_s = spending.step_s * (step - newest + num_steps)
        self._asking.request(step, num_steps, why, now_ns=now_ns, wait_s=wait_s)

    def _take_in(self, asked: PendingCapture) -> None:
        ranks = self._processes.list_stepping_processes()
        files = self._asking.collect_traces(asked, ranks)
        place = self._wanted.pop(0) if asked.reason == SLOWDOWN and self._wanted else None
        if not files:
            self._refused += 1
            return
        self._taken += 1
        heads = [one.steps.read_header() for one in ranks if one.steps is not None]
        costs = [
            head.capture_cost_ns / 1e9
            for head in heads
            if head.last_answered_request == asked.number
        ]
        self._costs_s.append(max(costs, default=0.0))
        since = self._slowdowns[place].step if place is not None else None
        wanted = CaptureRequest(asked.number, asked.step, asked.num_steps, since)

        def errand() -> ResultCallback:
            judged = self._captures.add(wanted, files)
            return lambda: self._judged(judged, place)

        self._errands.submit(errand)

    def _judged(self, judged: CaptureAssessment, place: int | None) -> None:
        if place is None or judged.status is None:
            return
        old = self._slowdowns[place]
        self._slowdowns[place] = replace(
            old,
            capture=judged.status.folder,
            reference=judged.reference,
            changes=(*judged.changes, *old.changes),
            finding=judged.finding,
        )

    def _check_hangs(self, ranks: list[WatchedProcess], now_ns: int) -> None:
        ends = [one.steps.read_last_step_end_ns() for one in ranks if one.steps is not None]
        last_ns = max((end for end in ends if end is not None), default=self._began_ns)
        if self._hang_since_ns is not None:
            if last_ns > self._hang_since_ns:
                after_s = (last_ns - self._hang_since_ns) / 1e9
                self._hang_since_ns = None
                if self._hangs:
                    self._hangs[-1] = replace(self._hangs[-1], resumed_after_s=after_s)
            return
        waited_s = (now_ns - last_ns) / 1e9
        step_s = compute_median_step_s(ranks)
        to_ask = self._processes.list_reachable_processes()
        if waited_s < compute_hang_timeout_s(self._settings.hang_timeout_s, step_s) or not to_ask:
            return
        self._hang_since_ns = last_ns
        if len(self._hangs) >= MAX_EVENTS:
            return
        step = max((one.num_steps for one in ranks), default=0)
        place = len(self._hangs)
        name = f"{place + 1:03d}-step-{step}"
        self._hangs.append(HangStatus(last_step=step, detected_after_s=waited_s))

        def errand() -> ResultCallback:
            gathered = collect_hang_report(self._folder, to_ask, name)
            return lambda: self._gathered(place, gathered)

        self._errands.submit(errand)

    def _gathered(self, place: int, gathered: HangReport) -> None:
        self._hangs[place] = replace(
            self._hangs[place],
            folder=gathered.folder,
            positions=gathered.positions,
            diagnosis=gathered.diagnosis,
            num_dumps=gathered.num_dumps,
        )
        self._write()

    def build_status(self) -> WatchStatus:
        """Sum up what is known."""
        ranks = self._processes.list_stepping_processes()
        now_ns = time.monotonic_ns()
        spending = self._spending(ranks, now_ns)
        reader = ranks[0].steps if ranks else None
        figures = (
            summarize_step_times(reader.read_step_durations(MAX_TIMES).step_s)
            if reader is not None
            else None
        )
        rows = tuple(summarize_process(one) for one in ranks)
        every = self._settings.capture_interval
        if every is None and spending is not None:
            every = choose_capture_interval(spending, self._settings.max_overhead)
        return WatchStatus(
            command=self._command,
            watcher_pid=os.getpid(),
            job_pid=self._job,
            exit_code=self._code,
            started_unix_s=self._since_s,
            elapsed_s=(now_ns - self._began_ns) / 1e9,
            processes=len(self._processes.processes),
            steps=max((one.num_steps for one in ranks), default=0),
            step_ms=1e3 * figures.median_s if figures else None,
            step_time_variation=figures.variation if figures else None,
            slowest_ms=1e3 * figures.slowest_s if figures else None,
            overhead_share=max((row.overhead_share for row in rows), default=0.0),
            max_overhead=self._settings.max_overhead,
            capture_interval=every,
            fixed_interval=self._settings.capture_interval is not None,
            ranks=rows,
            captures=tuple(one for _, one in sorted(dict(self._captures.captures).items())),
            captures_taken=self._taken,
            captures_dropped=self._captures.num_dropped,
            captures_refused=self._refused,
            capture_costs_ms=tuple(1e3 * cost_s for cost_s in self._costs_s),
            slowdowns=tuple(self._slowdowns),
            hangs=tuple(self._hangs),
            lost_processes=tuple(self._deaths),
            hardware=summarize_samples(list(self._sampler.samples)),
            has_errors=self._folder.log.exists(),
            notes=tuple(collect_notes(ranks)),
        )
