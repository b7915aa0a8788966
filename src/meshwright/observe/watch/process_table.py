"""The processes of a watched job: who said that it is there, and who steps."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwright.observe.watch.step_pace import summarize_step_times
from meshwright.observe.watch.step_page_reader import StepPageReader
from meshwright.observe.watch.watch_folder import WatchFolder


class ProcessAnnouncement(msgspec.Struct, frozen=True):
    """What a process says of itself once it has imported torch."""

    pid: int
    rank: int | None = None
    local_rank: int | None = None
    main_thread: int | None = None
    signal: int | None = None
    torch: str = ""


class WatchedProcess:
    """One process, and its page once it has stepped."""

    def __init__(self, announcement: ProcessAnnouncement) -> None:
        self.announcement = announcement
        self.steps: StepPageReader | None = None
        self.rank: int | None = announcement.rank
        self.is_gone = False

    @property
    def num_steps(self) -> int:
        """How many steps it has made."""
        return self.steps.read_header().num_steps if self.steps is not None else 0


class ProcessTable:
    """All processes seen so far; `refresh` finds new ones."""

    def __init__(self, folder: WatchFolder) -> None:
        self._folder = folder
        self.processes: dict[int, WatchedProcess] = {}

    def refresh(self) -> None:
        """Find processes that came, and pages that they began."""
        for path in self._folder.agents.glob("*.json"):
            if path.stem.isdecimal() and int(path.stem) not in self.processes:
                said = _announced(path)
                if said is not None:
                    self.processes[said.pid] = WatchedProcess(said)
        for path in self._folder.agents.glob("*.steps"):
            if path.stem.isdecimal():
                # A forked child steps without having said that it is there.
                process = self.processes.setdefault(
                    int(path.stem), WatchedProcess(ProcessAnnouncement(int(path.stem)))
                )
                if process.steps is None or process.steps.file != _file(path):
                    self._open(process, path)

    def _open(self, process: WatchedProcess, path: Path) -> None:
        try:
            process.steps = StepPageReader(path)
        except (OSError, ValueError):
            return
        rank = process.steps.read_header().rank
        taken = {one.rank for one in self.list_stepping_processes() if one is not process}
        # Without a rank of its own, or with another's (a restarted one): as long as it is free.
        if rank < 0:
            rank = next(number for number in range(len(taken) + 1) if number not in taken)
        process.rank = rank

    def list_stepping_processes(self) -> list[WatchedProcess]:
        """Those that have stepped, by rank; of a rank that was started again, the last one."""
        found: dict[int, WatchedProcess] = {}
        for process in self.processes.values():
            if process.steps is not None and process.rank is not None:
                found[process.rank] = process
        return [found[rank] for rank in sorted(found)]

    def list_reachable_processes(self) -> list[WatchedProcess]:
        """Those whose stacks tell where the job stands: ranks; without any, whoever is there."""
        own = [one for one in self.list_stepping_processes() if not one.is_gone]
        known = {one.rank for one in own}
        waiting: dict[int, WatchedProcess] = {}
        for process in self.processes.values():
            if process.rank is not None and process.rank not in known and not process.is_gone:
                waiting.setdefault(process.rank, process)
        ranks = sorted([*own, *waiting.values()], key=lambda one: one.rank or 0)
        return ranks or [one for one in self.processes.values() if not one.is_gone]


def _file(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _announced(path: Path) -> ProcessAnnouncement | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessAnnouncement)
    except (OSError, msgspec.MsgspecError):
        return None


def is_alive(pid: int) -> bool:
    """Tell whether a process is there and is no corpse that nobody has buried."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return False
    except (OSError, IndexError):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def compute_median_step_s(processes: Sequence[WatchedProcess], most: int = 2000) -> float | None:
    """Return the middle step of the first rank; None before there are two."""
    for process in processes:
        if process.steps is not None:
            figures = summarize_step_times(process.steps.read_step_durations(most).step_s)
            if figures is not None:
                return figures.median_s
    return None
