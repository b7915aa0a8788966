"""How much of a machine others used while something ran: so that a difference can be put to them.

Linux counts what all cores did; what our own processes took is taken off. Elsewhere nothing is
known.
"""

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)
"""Columns of time that was worked: user, nice, system, irq, softirq (proc(5))."""


class HostLoadMeter:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._began, self._busy_s = time.monotonic(), read_total_busy_s()
        self._own_s = time.process_time()

    def measure_other_cores(self, ranks_s: float) -> float | None:
        """Return how many cores others kept busy on the mean.

        `ranks_s` is what the ranks took of cores; this process is counted by itself.
        """
        now = read_total_busy_s()
        if now is None or self._busy_s is None:
            return None
        own_s = ranks_s + time.process_time() - self._own_s
        wall_s = max(1e-9, time.monotonic() - self._began)
        return max(0.0, now - self._busy_s - own_s) / wall_s


def read_total_busy_s() -> float | None:
    """Return how long all cores have worked since the machine started; None where nobody tells."""
    if not _STAT.exists():
        return None
    columns = _STAT.read_text().partition("\n")[0].split()[1:]
    return sum(int(columns[at]) for at in _BUSY) / os.sysconf("SC_CLK_TCK")
