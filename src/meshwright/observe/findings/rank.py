"""What detectors ask of one rank: its facts, and why its device is idle.

Gaps in which the device had nothing to do because the host launched late are shared out among
causes in a fixed order, so that no moment is told twice: data, synchronisation, first calls,
compilation, garbage collection, checkpoints, the allocator, the profiler, launching, the rest.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans import (
    Flags,
    Intervals,
    Ints,
    clip,
    covered,
    gaps,
    intersect,
    measure,
    subtract,
    union,
    where,
)
from meshwright.observe.findings.facts import Facts
from meshwright.observe.findings.names import host_sort
from meshwright.timeline.schema import ABSENT

LONG_LAUNCH_NS = 5_000_000
LONG_OPERATOR_NS = 50_000_000
LEAST_IN_SECOND_HALF = 0.2
"""What goes on for a whole profile has about half of its cost in the second half."""


def _is_kernel_operator(name: str) -> bool:
    return name.startswith("aten::") and not host_sort(name)


class Waits(NamedTuple):
    """Calls in which the host waits for the device, and what each costs."""

    row: Ints
    cost_ns: Ints
    """Device idle from the moment it ran dry during the call to its next work."""
    gap_start: Ints
    gap_end: Ints


class Rank(Facts, frozen=True, eq=False, dict=True):
    """One rank, and why its device is idle."""

    @cached_property
    def gaps(self) -> Intervals:
        """When the device is idle."""
        return gaps(self.spans.of(), self.spans.window_ns)

    @cached_property
    def ending(self) -> Ints:
        """The device span that ends each gap."""
        return np.searchsorted(self.spans.start, self.gaps.end, side="left")

    @cached_property
    def late(self) -> Flags:
        """Which gaps are there because the host launched late."""
        launch = self.launch[self.ending] if self.ending.size else self.ending
        late: Flags = (launch != ABSENT) & (self.start[launch] > self.gaps.start)
        return late

    @cached_property
    def late_gaps(self) -> Intervals:
        """Those gaps."""
        return Intervals(self.gaps.start[self.late], self.gaps.end[self.late])

    @cached_property
    def waits(self) -> Waits:
        """Calls in which the host waited until the device ran dry."""
        rows = self.host_rows("waiting")
        rows = rows[np.argsort(self.start[rows], kind="stable")]
        gap = self.late_gaps
        if not rows.size or not gap.start.size:
            none = np.zeros(0, dtype=np.int64)
            return Waits(none, none, none, none)
        # The latest call that began before the gap and had not returned when it began.
        place = np.searchsorted(self.start[rows], gap.start, side="right") - 1
        inside = (place >= 0) & (self.end[rows[np.maximum(place, 0)]] >= gap.start)
        data = covered(self.host_time("loading"), gap.start, gap.end)
        cost = (gap.end - gap.start - data)[inside]
        return Waits(rows[place[inside]], cost, gap.start[inside], gap.end[inside])

    @cached_property
    def starting(self) -> Intervals:
        """When the host was in calls that take so long only the first time.

        Launching takes microseconds: a launch of 5 ms loads code, or waits in a full queue (then
        the device is busy). An operator of 50 ms that launches, while the device has nothing to
        do, searches algorithms or makes a context; one that launches nothing computes on the host.
        Allocations and compilations belong here if only the first half of the window shows them.
        """
        names = self.part.strings("name")
        longest = self.end - self.start
        launching = where(names, lambda name: "Launch" in name or "FuncGetAttr" in name)
        long = self.host & launching & (longest >= LONG_LAUNCH_NS)
        slow = np.flatnonzero(
            self.host & (longest >= LONG_OPERATOR_NS) & where(names, _is_kernel_operator)
        )
        calls = np.sort(self.start[np.unique(self.launch[self.launch != ABSENT])])
        inside = np.searchsorted(calls, self.end[slow]) > np.searchsorted(calls, self.start[slow])
        long[slow[inside]] = True
        for sort in ("compiling", "allocating"):
            rows = self.host_rows(sort)
            if rows.size and not self.goes_on(rows):
                long[rows] = True
        return union(self.start[long], self.end[long])

    def goes_on(self, rows: Ints) -> bool:
        """Whether the late gaps in these rows are in the second half of the window too."""
        lost = intersect(self.late_gaps, union(self.start[rows], self.end[rows]))
        low, high = self.spans.window_ns
        second = measure(clip(lost, ((low + high) // 2, high)))
        return second >= max(1, measure(lost)) * LEAST_IN_SECOND_HALF

    @cached_property
    def claims(self) -> dict[str, Intervals]:
        """Late gaps by cause; each moment is in one of them."""
        waits = self.waits
        overhead = self.category("overhead")
        regions = self.launches.launch_bound
        bound = (np.array([one[at] for one in regions], dtype=np.int64) for at in (0, 1))
        asked = {
            "loading": self.host_time("loading"),
            "waiting": union(waits.gap_start, waits.gap_end),
            "starting": self.starting,
            "compiling": self.host_time("compiling"),
            "collecting": self.host_time("collecting"),
            "saving": self.host_time("saving"),
            "allocating": self.host_time("allocating"),
            "profiling": union(self.start[overhead], self.end[overhead]),
            "launching": union(*bound),
        }
        left, claimed = self.late_gaps, {}
        for cause, when in asked.items():
            claimed[cause] = intersect(left, when)
            left = subtract(left, claimed[cause])
        return {**claimed, "rest": left}

    def claimed_ns(self, cause: str) -> int:
        """How much of the late gaps one cause has."""
        return measure(self.claims[cause])
