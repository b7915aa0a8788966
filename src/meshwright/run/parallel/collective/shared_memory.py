"""`Doorbells`: a rank that has nothing to do sleeps until a peer that gave it something wakes it.

Each rank has a word in shared memory that is 1 while it sleeps. The system's futex call puts it to
sleep on that word and wakes it (futex(2)). A wake that comes in the very moment of falling asleep
may be lost, so a sleep never lasts long.
"""

import ctypes
import mmap
import os
import platform
from pathlib import Path

import torch

_SYS_FUTEX = 202  # x86-64, whose memory order we rely on: see `SharedMemorySegment`

_WAIT, _WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbells:
    """The words of all ranks of a segment."""

    def __init__(self, words: memoryview, places: list[int], rank: int, nap_s: float) -> None:
        """`places` are the words of the ranks; this one sleeps for `nap_s` at most."""
        self._words, self._places, self._mine = words, places, places[rank]
        first = ctypes.addressof(ctypes.c_char.from_buffer(words))
        self._addresses = [ctypes.c_void_p(first + place * 8) for place in places]
        self._rank = rank
        self._nap = ctypes.byref(_Timespec(0, int(nap_s * 1e9)))
        self._call = ctypes.CDLL(None, use_errno=True).syscall

    def wake(self, rank: int) -> None:
        """Wake a rank if it sleeps."""
        place = self._places[rank]
        if self._words[place]:
            self._words[place] = 0
            self._call(_SYS_FUTEX, self._addresses[rank], _WAKE, 1, None, None, 0)

    def prepare_sleep(self) -> None:
        """Tell the others that this rank is about to sleep; look once more before `sleep`."""
        self._words[self._mine] = 1

    def sleep(self) -> None:
        """Sleep until somebody wakes this rank, or for one nap."""
        self._call(_SYS_FUTEX, self._addresses[self._rank], _WAIT, 1, self._nap, None, 0)
        self._words[self._mine] = 0

    def cancel_sleep(self) -> None:
        """Take back `prepare_sleep`."""
        self._words[self._mine] = 0


def count_available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


_FOLDER = Path("/dev/shm")

_LINE_WORDS = 8
"""64-bit words of a cache line: counters that different ranks write must not share one."""

ROW_WORDS = 48
"""Words of a rank's row in the ledger."""

_PAGE = 4096


def is_available() -> bool:
    """Whether processes of this machine can exchange data through memory."""
    return platform.machine() in ("x86_64", "AMD64") and _FOLDER.is_dir()


def get_host_id() -> str:
    """Return what processes have in common that see each other's memory files and numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = Path("/proc/self/ns/pid")
    parts = [
        boot.read_text().strip() if boot.exists() else platform.node(),
        str(_FOLDER.stat().st_dev) if _FOLDER.is_dir() else "",
        str(spaces.readlink()) if spaces.exists() else "",
    ]
    return ":".join(parts)


class SharedMemorySegment:
    """The mapped file. Lane `source · ranks + target` leads from one rank to another.

    One side writes a cell and then its counter, the other reads the counter and then the cell. That
    order is kept by processors with total store order (x86), which is why `is_available` asks for
    one.
    """

    def __init__(self, token: str, *, ranks: int, cells: int, cell_bytes: int, make: bool) -> None:
        self.ranks, self.cells, self.cell_bytes = ranks, cells, cell_bytes
        self.path = _FOLDER / f"meshwright-{token}"
        lanes = ranks * ranks
        self._lane_words = (2 + -(-cells // _LINE_WORDS)) * _LINE_WORDS
        bells = ranks * ROW_WORDS + lanes * self._lane_words
        self.doorbells = [bells + rank * _LINE_WORDS for rank in range(ranks)]
        """For each rank the word that says whether it sleeps."""
        words = bells + ranks * _LINE_WORDS
        self._data = -(-words * 8 // _PAGE) * _PAGE
        size = self._data + lanes * cells * cell_bytes
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0)
        handle = os.open(self.path, flags, 0o600)
        try:
            if make:
                os.ftruncate(handle, size)  # pages come into being when they are touched
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self.words = memoryview(self._map)[: words * 8].cast("q")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._lanes: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def get_row(self, rank: int) -> memoryview:
        """Return the ledger's row of a rank."""
        return self.words[rank * ROW_WORDS : (rank + 1) * ROW_WORDS]

    def unlink(self) -> None:
        """Remove the file's name; those who mapped it keep it."""
        self.path.unlink(missing_ok=True)

    def get_counters(self, source: int, target: int) -> tuple[int, int, int]:
        """Return the words of a lane: frames sent, frames taken, and the tag of the first cell."""
        first = self.ranks * ROW_WORDS + (source * self.ranks + target) * self._lane_words
        return first, first + _LINE_WORDS, first + 2 * _LINE_WORDS

    def get_lane(self, source: int, target: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the cells of a lane as elements of a type."""
        key = source, target, dtype
        if key not in self._lanes:
            first = (source * self.ranks + target) * self.cells
            starts = [self._data + (first + cell) * self.cell_bytes for cell in range(self.cells)]
            self._lanes[key] = [
                self._bytes[start : start + self.cell_bytes].view(dtype) for start in starts
            ]
        return self._lanes[key]
