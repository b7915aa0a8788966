"""`Doorbells`: a rank that has nothing to do sleeps until a peer that gave it something wakes it.

Each rank has a word in shared memory that is 1 while it sleeps. The system's futex call puts it to
sleep on that word and wakes it (futex(2)). A wake that comes in the very moment of falling asleep
may be lost, so a sleep never lasts long.
"""

import ctypes
import os

_SYS_FUTEX = 202  # x86-64, the only machine whose memory order we rely on (see segment.py)
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

    def lie_down(self) -> None:
        """Tell the others that this rank is about to sleep; look once more before `sleep`."""
        self._words[self._mine] = 1

    def sleep(self) -> None:
        """Sleep until somebody wakes this rank, or for one nap."""
        self._call(_SYS_FUTEX, self._addresses[self._rank], _WAIT, 1, self._nap, None, 0)
        self._words[self._mine] = 0

    def stay_up(self) -> None:
        """Take back `lie_down`."""
        self._words[self._mine] = 0


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))
