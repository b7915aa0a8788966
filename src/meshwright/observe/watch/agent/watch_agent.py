"""`WatchAgent`: the state of one watched process, moved on whenever a step ends."""
# ruff: noqa: TID252 - loaded under another name in the job, see the package

import json
import os
import sys
import time
from collections import deque
from statistics import median
from typing import Any

from .capture_timeout import MainThreadTimer, is_main_thread
from .error_log import ErrorLog
from .profiler_capture import ProfilerCapture
from .profiler_guard import ProfilerGuard
from .shared_pages import (
    CAPTURED,
    CAPTURES_OFF,
    ENDED,
    FAILED,
    PLAIN,
    PROFILES_ITSELF,
    CaptureCommand,
    ControlPage,
    StepPage,
)
from .stack_signal import dump_flight_recorder, serve_dump_requests
from .step_boundary import StepBoundary

RECENT = 32
"""Plain steps whose middle a captured step is held against."""
MAX_ERRORS = 3
"""After so many captures that failed, no more are taken."""
CAPTURE_TIMEOUT_STEPS = 10
MIN_CAPTURE_TIMEOUT_S = 5.0
"""A step that takes longer than both, as one that evaluates, is not recorded to its end."""


class WatchAgent:
    """What is known of this process; every way in swallows what goes wrong."""

    def __init__(self, folder: str, torch: Any, log: ErrorLog) -> None:
        self._folder, self._torch, self._log = folder, torch, log
        self._settings = _settings(os.path.join(folder, "settings.json"), log)  # noqa: PTH118
        self._turn = ProfilerGuard(self._give_way)
        self._turn.install_hooks(torch)
        self._control = ControlPage(os.path.join(folder, "control"))  # noqa: PTH118
        self._fresh()

    def _fresh(self) -> None:
        self._lead = StepBoundary()
        self._alarm = MainThreadTimer(self._give_way)
        self._page: StepPage | None = None
        self._rank = -1
        self._capture: ProfilerCapture | None = None
        self._answered = self._faults = 0
        self._left_ns: int | None = None
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._excess_ns = 0
        self._spoilt = False
        self._off = False

    def on_optimizer_step(self, optimizer: int) -> None:
        """Take note that an optimizer has stepped."""
        self._heard(optimizer, graph=False)

    def on_graph_replay(self, graph: int) -> None:
        """Take note that a CUDA graph was sent off."""
        self._heard(graph, graph=True)

    def _heard(self, number: int, *, graph: bool) -> None:
        if self._off:
            return
        try:
            if self._lead.is_step_end(number, graph=graph):
                self._step_ended(time.monotonic_ns())
        except Exception:  # noqa: BLE001 - watching ends, the job goes on
            self._off = True
            self._log.write("cannot write step")

    def _step_ended(self, ended_ns: int) -> None:
        page = self._page or self._first_step()
        took_ns = None if self._left_ns is None else ended_ns - self._left_ns
        number = page.num_steps + 1
        mark = PLAIN
        if self._capture is not None:
            mark = CAPTURED
            self._excess_ns += self._longer_by(took_ns)
            self._go_on(number)
        else:
            if self._spoilt:
                mark, self._spoilt = CAPTURED, False
            elif took_ns is not None:
                self._recent.append(took_ns)
            request = self._control.read()
            if request.number != self._answered:
                self._consider(request, number)
        left_ns = time.monotonic_ns()
        page.add(ended_ns, left_ns - ended_ns, mark)
        self._left_ns = left_ns

    def _longer_by(self, took_ns: int | None) -> int:
        """By how much a captured step exceeds the middle of the plain ones before it."""
        if took_ns is None or not self._recent:
            return 0
        return max(0, took_ns - int(median(self._recent)))

    def _consider(self, request: CaptureCommand, ended: int) -> None:
        """Begin what is asked for with the next step, where it is time to."""
        if ended + 1 < request.first_step:
            return
        self._answered = request.number
        page = self._page
        if page is None:
            return
        profiling = self._turn.jobs or self._torch.autograd._profiler_enabled()  # noqa: SLF001
        page.set_state(PROFILES_ITSELF, profiling)
        if profiling or self._faults >= MAX_ERRORS or not is_main_thread():
            page.reject_request(request.number)
            return
        self._excess_ns = 0
        self._turn.ours = True
        try:
            self._capture = ProfilerCapture(
                self._torch,
                request,
                shapes=bool(self._settings.get("record_shapes", True)),
                stack=bool(self._settings.get("with_stack", False)),
            )
            self._capture.start(ended + 1)
            self._alarm.set(self._longest_s(request.num_steps))
        except Exception:  # noqa: BLE001 - without a capture, but with the step
            self._failed("a capture could not begin")
        finally:
            self._turn.ours = False

    def _go_on(self, ended: int) -> None:
        capture, page = self._capture, self._page
        if capture is None or page is None:
            return
        self._turn.ours = True
        try:
            if not capture.end_step(ended):
                return
            self._alarm.clear()
            name = f"{capture.request.number:06d}-{os.getpid()}-{self._rank}.json"
            capture.finish(os.path.join(self._folder, "incoming", name))  # noqa: PTH118
            self._capture = None
            cost_ns = capture.overhead_ns + self._excess_ns
            page.record_capture(cost_ns, self._excess_ns, capture.request.number)
        except Exception:  # noqa: BLE001
            self._failed("cannot write capture")
        finally:
            self._turn.ours = False

    def _failed(self, what: str) -> None:
        self._log.write(what)
        self._alarm.clear()
        self._faults += 1
        capture, self._capture = self._capture, None
        try:
            if capture is not None:
                capture.abandon()
        except Exception:  # noqa: BLE001
            self._log.write("a capture could not be ended")
        if self._page is not None:
            self._page.reject_request(self._answered)
            self._page.set_state(CAPTURES_OFF, self._faults >= MAX_ERRORS)

    def _longest_s(self, num_steps: int) -> float:
        usual_s = median(self._recent) / 1e9 if self._recent else 0.0
        return max(MIN_CAPTURE_TIMEOUT_S, CAPTURE_TIMEOUT_STEPS * usual_s * num_steps)

    def _give_way(self) -> None:
        """End a capture: the job is about to profile itself, or the step does not end."""
        self._alarm.clear()
        capture, self._capture = self._capture, None
        if capture is None:
            return
        self._spoilt = True
        self._turn.ours = True
        try:
            capture.abandon()
            if self._page is not None:
                self._page.reject_request(self._answered)
        except Exception:  # noqa: BLE001
            self._log.write("a capture could not give way")
        finally:
            self._turn.ours = False

    def _first_step(self) -> StepPage:
        pid = os.getpid()
        stem = os.path.join(self._folder, "agents", str(pid))  # noqa: PTH118
        distributed = self._torch.distributed
        spread = distributed.is_available() and distributed.is_initialized()
        self._rank = distributed.get_rank() if spread else _rank_said()
        # A request from before this process stepped is none of its own.
        self._answered = self._control.read().number
        self._page = StepPage(f"{stem}.steps", pid, self._rank, time.monotonic_ns())
        if spread:
            serve_dump_requests(f"{stem}.ask", self._dump)
        return self._page

    def _dump(self) -> None:
        try:
            said = dump_flight_recorder(self._torch)
            if said is None:
                return
            path = os.path.join(self._folder, "flight", f"rank_{self._rank}")  # noqa: PTH118
            handle = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(said)
            os.replace(f"{path}.part", path)  # noqa: PTH105
        except Exception:  # noqa: BLE001
            self._log.write("the flight recorder could not be dumped")

    def on_exit(self) -> None:
        """The interpreter ends by itself: this process was not killed."""
        try:
            self._give_way()
            if self._page is not None:
                # Python keeps what nobody caught here.
                self._page.set_state(FAILED, getattr(sys, "last_type", None) is not None)
                self._page.set_state(ENDED, True)
        except Exception:  # noqa: BLE001
            self._log.write("cannot write exit status")

    def on_fork(self) -> None:
        """Begin anew in a child: the pages are its parent's."""
        self._fresh()


def _rank_said() -> int:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return -1


def _settings(path: str, log: ErrorLog) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            found = json.load(file)
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        log.write("cannot read settings")
        return {}
