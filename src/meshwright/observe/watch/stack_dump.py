"""Where every rank of a job stands: stacks asked for by a signal, parsed, and put together."""

import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.observe.watch.process_table import WatchedProcess, is_alive
from meshwright.observe.watch.watch_folder import WatchFolder

STACKS_TIMEOUT_S = 3.0
"""How long processes have to write their stacks."""
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[[^\]]*\])?.*most recent")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_FIRST_SIGNAL = int(getattr(signal, "SIGRTMIN", 1 << 30))
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


class PythonFrame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ThreadStack(NamedTuple):
    """The stack of one thread, the newest call first."""

    thread: int
    frames: tuple[PythonFrame, ...]

    @property
    def user_frame(self) -> PythonFrame | None:
        """The newest call of the job's own code; of any code where there is none."""
        for frame in self.frames:
            if not any(part in frame.file for part in _LIBRARY):
                return frame
        return self.frames[0] if self.frames else None


class ProcessStacks(NamedTuple):
    """Where one process stands."""

    rank: int | None
    pid: int
    stacks: tuple[ThreadStack, ...]
    """Of all threads, the main one first; none where it did not answer."""
    missing_reason: str
    """Why there are none."""

    @property
    def position_text(self) -> str:
        """Where it stands, in one line."""
        if not self.stacks or not self.stacks[0].frames:
            return self.missing_reason or "no Python stack"
        stack = self.stacks[0]
        own, newest = stack.user_frame, stack.frames[0]
        if own is None or own == newest:
            return str(newest)
        return f"{own}, then {Path(newest.file).name}:{newest.line} in {newest.function}"


def parse_faulthandler(text: str, main_thread: int | None = None) -> tuple[ThreadStack, ...]:
    """Read what `faulthandler` wrote; the main thread comes first.

    It writes the newest thread first and the main one last, so that is the guess.
    """
    found: list[tuple[int, list[PythonFrame]]] = []
    for line in text.splitlines():
        thread = _THREAD.match(line)
        frame = _FRAME.match(line)
        if thread:
            found.append((int(thread[1], 16), []))
        elif frame and found:
            number = int(frame[2]) if frame[2].isdecimal() else 0
            found[-1][1].append(PythonFrame(frame[1], number, frame[3]))
    stacks = [ThreadStack(thread, tuple(frames)) for thread, frames in found]
    first = next((one for one in stacks if one.thread == main_thread), None)
    if first is None and stacks:
        first = stacks[-1]
    return tuple(sorted(stacks, key=lambda one: one is not first))


def request_stacks(
    folder: WatchFolder, processes: Iterable[WatchedProcess], within_s: float = STACKS_TIMEOUT_S
) -> list[ProcessStacks]:
    """Have every process write its stacks, and read them."""
    asked = [(process, *_send(folder, process)) for process in processes]
    until = time.monotonic() + within_s
    found = []
    for process, path, size, why in asked:
        text = "" if why else _written(path, size, until)
        said = process.announcement
        reason = why or ("" if text else "did not answer")
        found.append(
            ProcessStacks(
                process.rank, said.pid, parse_faulthandler(text, said.main_thread), reason
            )
        )
    return found


def _send(folder: WatchFolder, process: WatchedProcess) -> tuple[Path, int, str]:
    said = process.announcement
    path = folder.agents / f"{said.pid}.stacks"
    # Agents take real-time signals only: a folder that names another one is not to be obeyed.
    if said.signal is None or said.signal < _FIRST_SIGNAL or not path.exists():
        return path, 0, "has no handler for stacks"
    if not is_alive(said.pid):
        return path, 0, "is gone"
    size = path.stat().st_size
    # Without its handler the signal would end the process: ask the kernel first.
    if not _handles(said.pid, said.signal):
        return path, 0, "has no handler for stacks any more"
    try:
        os.kill(said.pid, said.signal)
    except OSError as error:
        return path, 0, f"cannot be asked: {error.strerror}"
    return path, size, ""


def _handles(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _written(path: Path, size: int, until: float) -> str:
    """Return what was added to a file, once no more comes."""
    seen = size
    while True:
        now = path.stat().st_size
        if now > size and now == seen:
            break
        if time.monotonic() > until:
            break
        seen = now
        time.sleep(0.05)
    with path.open("rb") as file:
        file.seek(size)
        return file.read().decode("utf-8", "replace")


def group_by_position(standings: Sequence[ProcessStacks]) -> list[tuple[list[int], str]]:
    """Ranks by where they stand, the largest group first: the odd ones out are worth a look."""
    groups: dict[str, list[int]] = {}
    for one in standings:
        groups.setdefault(one.position_text, []).append(one.rank if one.rank is not None else -1)
    rows = [(sorted(ranks), place) for place, ranks in groups.items()]
    return sorted(rows, key=lambda row: (-len(row[0]), row[0]))


def format_stacks(standings: Iterable[ProcessStacks]) -> str:
    """All stacks, to be read by people."""
    lines = []
    for one in standings:
        lines.append(
            f"rank {one.rank if one.rank is not None else '?'} (pid {one.pid}) {one.missing_reason}"
        )
        for number, stack in enumerate(one.stacks):
            lines.append("  main thread" if number == 0 else f"  thread {stack.thread:#x}")
            lines += [f"    {frame}" for frame in stack.frames]
    return "\n".join(lines) + "\n"
