"""`Segment`: a file in memory that all processes of one host map.

It holds a row of counters per rank (the ledger) and, for every pair of ranks, a ring of cells that
one side fills and the other empties. The file has no name any more once all have mapped it, so that
nothing is left behind however the processes end.

One side writes a cell and then its counter, the other reads the counter and then the cell. That
order is kept by processors with total store order (x86), which is why `usable` asks for one.
"""

import mmap
import os
import platform
from pathlib import Path

import torch

_FOLDER = Path("/dev/shm")
_LINE_WORDS = 8
"""64-bit words of a cache line: counters that different ranks write must not share one."""
ROW_WORDS = 48
"""Words of a rank's row in the ledger."""
_PAGE = 4096


def usable() -> bool:
    """Whether processes of this machine can exchange data through memory."""
    return platform.machine() in ("x86_64", "AMD64") and _FOLDER.is_dir()


def host_mark() -> str:
    """Return what processes have in common that see each other's memory files and numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = Path("/proc/self/ns/pid")
    parts = [
        boot.read_text().strip() if boot.exists() else platform.node(),
        str(_FOLDER.stat().st_dev) if _FOLDER.is_dir() else "",
        str(spaces.readlink()) if spaces.exists() else "",
    ]
    return ":".join(parts)


class Segment:
    """The mapped file. Lane `source · ranks + target` leads from one rank to another."""

    def __init__(self, token: str, *, ranks: int, cells: int, cell_bytes: int, make: bool) -> None:
        self.ranks, self.cells, self.cell_bytes = ranks, cells, cell_bytes
        self.path = _FOLDER / f"meshwright-{token}"
        lanes = ranks * ranks
        self._lane_words = (2 + -(-cells // _LINE_WORDS)) * _LINE_WORDS
        bells = ranks * ROW_WORDS + lanes * self._lane_words
        self.bells = [bells + rank * _LINE_WORDS for rank in range(ranks)]
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

    def row(self, rank: int) -> memoryview:
        """Return the ledger's row of a rank."""
        return self.words[rank * ROW_WORDS : (rank + 1) * ROW_WORDS]

    def forget_name(self) -> None:
        """Remove the file's name; those who mapped it keep it."""
        self.path.unlink(missing_ok=True)

    def counters(self, source: int, target: int) -> tuple[int, int, int]:
        """Return the words of a lane: frames sent, frames taken, and the tag of the first cell."""
        first = self.ranks * ROW_WORDS + (source * self.ranks + target) * self._lane_words
        return first, first + _LINE_WORDS, first + 2 * _LINE_WORDS

    def lane(self, source: int, target: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the cells of a lane as elements of a type."""
        key = source, target, dtype
        if key not in self._lanes:
            first = (source * self.ranks + target) * self.cells
            starts = [self._data + (first + cell) * self.cell_bytes for cell in range(self.cells)]
            self._lanes[key] = [
                self._bytes[start : start + self.cell_bytes].view(dtype) for start in starts
            ]
        return self._lanes[key]
