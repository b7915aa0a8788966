"""Asks all ranks for the same steps, and gathers what they write."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.observe.watch.agent.shared_pages import CaptureCommand, ControlPage
from meshwright.observe.watch.capture_store import IncomingTrace
from meshwright.observe.watch.process_table import WatchedProcess
from meshwright.observe.watch.watch_folder import WatchFolder, remove_path

REQUEST_TIMEOUT_S = 30.0
TIMEOUT_STEP_FACTOR = 5
_LATEST = 4
"""So many requests later a trace is no longer taken in."""
_NAME = re.compile(r"(\d+)-(\d+)-(-?\d+)\.json")


class PendingCapture(NamedTuple):
    """A capture that was asked for."""

    number: int
    step: int
    num_steps: int
    reason: str
    deadline_ns: int
    """When it is no longer waited for."""


class CaptureRequester:
    """At most one capture is asked for at a time."""

    def __init__(self, folder: WatchFolder) -> None:
        self._folder = folder
        self._page = ControlPage(str(folder.control), writes=True)
        self._number = 0
        self.pending: PendingCapture | None = None

    def request(self, step: int, num_steps: int, why: str, *, now_ns: int, wait_s: float) -> None:
        """Ask for steps from `step` on, which should be done in `wait_s` or so."""
        self._number += 1
        self._drop_late()
        late_ns = now_ns + int(1e9 * (REQUEST_TIMEOUT_S + TIMEOUT_STEP_FACTOR * wait_s))
        self.pending = PendingCapture(self._number, step, num_steps, why, late_ns)
        self._page.write(CaptureCommand(self._number, step, num_steps))

    def _drop_late(self) -> None:
        """Remove traces that came when nobody waited for them any more."""
        for path in self._folder.incoming.iterdir():
            number, _ = parse_trace_name(path)
            if 0 < number < self._number - _LATEST:
                remove_path(path)

    def poll(self, ranks: Sequence[WatchedProcess], now_ns: int) -> PendingCapture | None:
        """Return what was asked for once all ranks answered, or it is late."""
        asked = self.pending
        if asked is None:
            return None
        waiting = [one for one in ranks if not one.is_gone and _answered(one) < asked.number]
        if waiting and now_ns < asked.deadline_ns:
            return None
        self.pending = None
        return asked

    def collect_traces(
        self, asked: PendingCapture, ranks: Sequence[WatchedProcess]
    ) -> list[IncomingTrace]:
        """The traces that came for a request."""
        rank_of = {one.announcement.pid: one.rank for one in ranks}
        found: list[IncomingTrace] = []
        for path in sorted(self._folder.incoming.glob("*.json")):
            number, pid = parse_trace_name(path)
            if number == asked.number:
                rank = rank_of.get(pid)
                found.append(IncomingTrace(path, rank if rank is not None else len(found)))
        return found


def parse_trace_name(path: Path) -> tuple[int, int]:
    """Return the request and the process in the name of a trace; -1 where it says none."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _answered(process: WatchedProcess) -> int:
    return process.steps.read_header().last_answered_request if process.steps is not None else 0
