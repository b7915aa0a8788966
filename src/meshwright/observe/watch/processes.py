"""The processes of a watched job: who said that it is there, and who steps."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwright.observe.watch.folder import Folder
from meshwright.observe.watch.pace import usual
from meshwright.observe.watch.steps import StepReader


class Announced(msgspec.Struct, frozen=True):
    """What a process says of itself once it has imported torch."""

    pid: int
    rank: int | None = None
    local_rank: int | None = None
    main_thread: int | None = None
    signal: int | None = None
    torch: str = ""


class Process:
    """One process, and its page once it has stepped."""

    def __init__(self, said: Announced) -> None:
        self.said = said
        self.steps: StepReader | None = None
        self.rank: int | None = said.rank
        self.gone = False

    @property
    def num_steps(self) -> int:
        """How many steps it has made."""
        return self.steps.head().num_steps if self.steps is not None else 0


class Processes:
    """All processes seen so far; `look` finds new ones."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.all: dict[int, Process] = {}

    def look(self) -> None:
        """Find processes that came, and pages that they began."""
        for path in self._folder.agents.glob("*.json"):
            if path.stem.isdecimal() and int(path.stem) not in self.all:
                said = _announced(path)
                if said is not None:
                    self.all[said.pid] = Process(said)
        for path in self._folder.agents.glob("*.steps"):
            if path.stem.isdecimal():
                # A forked child steps without having said that it is there.
                process = self.all.setdefault(int(path.stem), Process(Announced(int(path.stem))))
                if process.steps is None or process.steps.file != _file(path):
                    self._open(process, path)

    def _open(self, process: Process, path: Path) -> None:
        try:
            process.steps = StepReader(path)
        except (OSError, ValueError):
            return
        rank = process.steps.head().rank
        taken = {one.rank for one in self.stepping() if one is not process}
        # Without a rank of its own, or with another's (a restarted one): as long as it is free.
        if rank < 0:
            rank = next(number for number in range(len(taken) + 1) if number not in taken)
        process.rank = rank

    def stepping(self) -> list[Process]:
        """Those that have stepped, by rank; of a rank that was started again, the last one."""
        found: dict[int, Process] = {}
        for process in self.all.values():
            if process.steps is not None and process.rank is not None:
                found[process.rank] = process
        return [found[rank] for rank in sorted(found)]

    def to_ask(self) -> list[Process]:
        """Those whose stacks tell where the job stands: ranks; without any, whoever is there."""
        own = [one for one in self.stepping() if not one.gone]
        known = {one.rank for one in own}
        waiting: dict[int, Process] = {}
        for process in self.all.values():
            if process.rank is not None and process.rank not in known and not process.gone:
                waiting.setdefault(process.rank, process)
        ranks = sorted([*own, *waiting.values()], key=lambda one: one.rank or 0)
        return ranks or [one for one in self.all.values() if not one.gone]


def _file(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _announced(path: Path) -> Announced | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Announced)
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


def usual_step_s(processes: Sequence[Process], most: int = 2000) -> float | None:
    """Return the middle step of the first rank; None before there are two."""
    for process in processes:
        if process.steps is not None:
            figures = usual(process.steps.times(most).step_s)
            if figures is not None:
                return figures.middle_s
    return None
