"""Asks all ranks for the same steps, and gathers what they write."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.observe.watch.agent.pages import ControlPage, Request
from meshwright.observe.watch.captures import Incoming
from meshwright.observe.watch.folder import Folder, remove
from meshwright.observe.watch.processes import Process

LATE_S = 30.0
LATE_TIMES = 5
_LATEST = 4
"""So many requests later a trace is no longer taken in."""
_NAME = re.compile(r"(\d+)-(\d+)-(-?\d+)\.json")


class Asked(NamedTuple):
    """A capture that was asked for."""

    number: int
    step: int
    num_steps: int
    why: str
    late_ns: int
    """When it is no longer waited for."""


class Asking:
    """At most one capture is asked for at a time."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._page = ControlPage(str(folder.control), writes=True)
        self._number = 0
        self.open: Asked | None = None

    def ask(self, step: int, num_steps: int, why: str, *, now_ns: int, wait_s: float) -> None:
        """Ask for steps from `step` on, which should be done in `wait_s` or so."""
        self._number += 1
        self._drop_late()
        late_ns = now_ns + int(1e9 * (LATE_S + LATE_TIMES * wait_s))
        self.open = Asked(self._number, step, num_steps, why, late_ns)
        self._page.write(Request(self._number, step, num_steps))

    def _drop_late(self) -> None:
        """Remove traces that came when nobody waited for them any more."""
        for path in self._folder.incoming.iterdir():
            number, _ = numbers(path)
            if 0 < number < self._number - _LATEST:
                remove(path)

    def done(self, ranks: Sequence[Process], now_ns: int) -> Asked | None:
        """Return what was asked for once all ranks answered, or it is late."""
        asked = self.open
        if asked is None:
            return None
        waiting = [one for one in ranks if not one.gone and _answered(one) < asked.number]
        if waiting and now_ns < asked.late_ns:
            return None
        self.open = None
        return asked

    def written(self, asked: Asked, ranks: Sequence[Process]) -> list[Incoming]:
        """The traces that came for a request."""
        rank_of = {one.said.pid: one.rank for one in ranks}
        found: list[Incoming] = []
        for path in sorted(self._folder.incoming.glob("*.json")):
            number, pid = numbers(path)
            if number == asked.number:
                rank = rank_of.get(pid)
                found.append(Incoming(path, rank if rank is not None else len(found)))
        return found


def numbers(path: Path) -> tuple[int, int]:
    """Return the request and the process in the name of a trace; -1 where it says none."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _answered(process: Process) -> int:
    return process.steps.head().answered if process.steps is not None else 0
