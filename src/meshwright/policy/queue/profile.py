"""How many GPUs are free from when on, as far as is expected."""

import math
from bisect import bisect_right

from meshwright.policy.queue.expected import Expected


class Profile:
    """How many GPUs are free from each of some times on."""

    def __init__(self, now_s: float, free: float, expected: Expected) -> None:
        """Begin with what is free now, and what running jobs leave when they end."""
        self.times, self.free = [now_s], [free]
        # Whoever is over its time may end at any moment, but not now.
        soon_s = math.nextafter(now_s, math.inf)
        for end_s, _, job in expected.ends:
            at_s = max(end_s, soon_s)
            if at_s > self.times[-1]:
                self.times.append(at_s)
                self.free.append(self.free[-1])
            self.free[-1] += job.held

    def earliest(self, gpus: float, lasts_s: float) -> float:
        """Return the first time from which so many are free for so long."""
        times, free = self.times, self.free
        at = 0
        while at < len(times):
            if free[at] < gpus:
                at += 1
                continue
            end_s, ahead = times[at] + lasts_s, at + 1
            while ahead < len(times) and times[ahead] < end_s and free[ahead] >= gpus:
                ahead += 1
            if ahead == len(times) or times[ahead] >= end_s:
                return times[at]
            at = ahead
        return math.inf

    def reserve(self, start_s: float, lasts_s: float, gpus: float) -> None:
        """Take so many for so long."""
        if start_s == math.inf:
            return
        first, last = self._cut(start_s), self._cut(start_s + lasts_s)
        self.free[first:last] = [free - gpus for free in self.free[first:last]]

    def move_to(self, now_s: float) -> None:
        """Forget what was before now."""
        at = bisect_right(self.times, now_s) - 1
        del self.times[:at], self.free[:at]
        self.times[0] = now_s

    def _cut(self, at_s: float) -> int:
        if at_s == math.inf:
            return len(self.times)
        at = bisect_right(self.times, at_s)
        if self.times[at - 1] == at_s:
            return at - 1
        self.times.insert(at, at_s)
        self.free.insert(at, self.free[at - 1])
        return at
