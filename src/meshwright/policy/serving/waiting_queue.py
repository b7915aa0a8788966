"""`WaitingQueue`: order of waiting requests: by priority, then by each tenant's share, then FIFO.

Each tenant has a counter of the tokens computed for it, divided by its weight; the tenant with the
least goes first (the virtual token counter of Sheng et al., arXiv 2401.00588). Whoever comes back
after a pause starts at the counter of those who wait, so that nobody saves up turns. Anybody can
call himself by a new name with every request: of those who are away only the latest are remembered.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """Something that waits."""

    priority: int
    tenant: str


W = TypeVar("W", bound=Schedulable)
MAX_TRACKED_TENANTS = 4096
"""Tenants whose counters are kept, beside those who wait."""


class WaitingQueue(Generic[W]):
    """Those who wait, in the order of their turns."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._levels: dict[int, dict[str, deque[W]]] = {}
        self._highest: list[int] = []
        """Priorities of those who wait, the highest first."""
        self._only: deque[W] | None = None
        """The one line there is, as long as there is one tenant and one priority."""
        self._left: set[W] = set()
        """Those who left while they waited: skipped when their turn comes."""
        self._got: dict[str, float] = {}
        """Counters of tenants, those who came last at the end."""
        self._floor = 0.0
        """The counter of the tenant whose turn was last."""
        self.count = 0
        """How many wait."""
        self.is_shared = False
        """Whether there has been more than one tenant."""

    def __len__(self) -> int:
        return self.count

    def charge_tokens(self, tenant: str, tokens: float) -> None:
        """Write down what was computed for a tenant."""
        got = self._got.get(tenant, self._floor)
        self._got[tenant] = got + tokens / self._weights.get(tenant, 1.0)
        self.is_shared = len(self._got) > 1

    def charge_tokens_each(self, those: Iterable[W], tokens: float) -> None:
        """Write down as much for each of many."""
        counts: dict[str, int] = {}
        for one in those:
            counts[one.tenant] = counts.get(one.tenant, 0) + 1
        for tenant, count in counts.items():
            self.charge_tokens(tenant, count * tokens)

    def push(self, one: W, *, first: bool = False) -> None:
        """Let somebody wait, as the last of its tenant and priority or as the first."""
        level = self._levels.get(one.priority)
        if level is None:
            level = self._levels[one.priority] = {}
            self._highest = sorted(self._levels, reverse=True)
        line = level.get(one.tenant)
        if line is None:
            line = level[one.tenant] = deque()
            self._only = line if len(self._levels) == len(level) == 1 else None
        # A tenant that is and was the only one has nobody to be level with.
        is_new = self.is_shared or one.tenant not in self._got
        if is_new and not line and not (self.count and self._is_waiting(one.tenant)):
            self._enter(one.tenant)
        if first:
            line.appendleft(one)
        else:
            line.append(one)
        self.count += 1

    def peek(self) -> W | None:
        """Return whose turn it is."""
        if not self.count:
            return None
        if self._only is not None and not self._left:
            return self._only[0]
        for priority in self._highest:
            line = self._first_line(priority)
            if line is not None:
                return line[0]
        raise AssertionError("somebody waits in no line")

    def pop(self, one: W | None = None) -> W:
        """Take out whose turn it is; `one` is who that is, where somebody has looked already."""
        one = self.peek() if one is None else one
        assert one is not None, "nobody waits"
        line = self._levels[one.priority][one.tenant]
        line.popleft()
        self.count -= 1
        self._floor = self._got[one.tenant]
        if not line and self._only is None:
            self._end_line(one.priority, one.tenant)
        return one

    def remove(self, one: W) -> None:
        """Let somebody who waits go."""
        self._left.add(one)
        self.count -= 1
        if not self.count:
            # Nobody's turn comes, so nobody would skip those who left.
            self._levels, self._highest, self._only = {}, [], None
            self._left.clear()

    def _first_line(self, priority: int) -> deque[W] | None:
        """Return the line of the tenant that got least; None where nobody waits."""
        least, found, ended = 0.0, None, []
        for tenant, line in self._levels[priority].items():
            while line and line[0] in self._left:
                self._left.discard(line.popleft())
            if not line:
                ended.append(tenant)
            elif found is None or self._got[tenant] < least:
                least, found = self._got[tenant], line
        for tenant in ended:
            self._end_line(priority, tenant)
        return found

    def _end_line(self, priority: int, tenant: str) -> None:
        """Take out a line in which nobody is left."""
        level = self._levels[priority]
        del level[tenant]
        if not level:
            del self._levels[priority]
            self._highest = sorted(self._levels, reverse=True)

    def _is_waiting(self, tenant: str) -> bool:
        lines = (level.get(tenant, ()) for level in self._levels.values())
        return any(one not in self._left for line in lines for one in line)

    def _enter(self, tenant: str) -> None:
        """Let a tenant that was away begin level with those who wait."""
        if not self.is_shared:
            self._got.setdefault(tenant, 0.0)
            self.is_shared = len(self._got) > 1
            if not self.is_shared:
                return
        waiting = [
            self._got[other]
            for level in self._levels.values()
            for other, line in level.items()
            if line and other != tenant
        ]
        least = min(waiting, default=self._floor)
        self._got[tenant] = max(self._got.pop(tenant, 0.0), least)
        if len(self._got) > 2 * MAX_TRACKED_TENANTS:
            self._forget(tenant)

    def _forget(self, entering: str) -> None:
        """Drop the counters of those who have been away longest."""
        waiting = {tenant for level in self._levels.values() for tenant in level} | {entering}
        away = [tenant for tenant in self._got if tenant not in waiting]
        for tenant in away[: len(self._got) - MAX_TRACKED_TENANTS]:
            del self._got[tenant]
