"""What detectors ask of one rank: its facts, and why its device is idle.

Gaps in which the device had nothing to do because the host launched late are shared out among
causes in a fixed order, so that no moment is told twice: data, first calls, compilation, garbage
collection, checkpoints, the allocator, the profiler, copies from pageable memory, synchronisation,
what follows from it, an optimizer that updates tensor by tensor, launching, the rest. What the host
does in a gap comes before the wait that the gap began in.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.idle import KERNEL_GAP_NS
from meshwright.observe.analyze.spans import (
    COMPUTE,
    MEMORY_COPY,
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
NEAR_SOFTMAX = 4
"""So many kernels may stand between a softmax and the products around it."""
MANY_UPDATES = 50
"""Kernels per step: an optimizer that launches more for its tensors takes them one by one."""
LEAST_IN_SECOND_HALF = 0.2
"""What goes on for a whole profile has about half of its cost in the second half."""


def _is_kernel_operator(name: str) -> bool:
    return name.startswith("aten::") and not host_sort(name)


class Waits(NamedTuple):
    """Calls in which the host waits for the device, and what each costs."""

    row: Ints
    cost_ns: Ints
    """Device idle from the moment it ran dry during the call to its next work; during the call only
    where it had run dry before."""
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

    def short_gaps_ns(self, which: Flags) -> int:
        """Gaps before these device spans that are the device's own: launched in time, and short."""
        if not self.ending.size:
            return 0
        length = self.gaps.end - self.gaps.start
        return int(length[which[self.ending] & ~self.late & (length < KERNEL_GAP_NS)].sum())

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
        # A gap that began otherwise: calls in it have the part of it that they take.
        within = np.searchsorted(gap.start, self.start[rows], side="right") - 1
        later = (within >= 0) & ~inside[within] & (self.start[rows] < gap.end[within])
        row = np.concatenate([rows[place[inside]], rows[later]])
        start = np.concatenate([gap.start[inside], self.start[rows[later]]])
        ended = np.minimum(self.end[rows[later]], gap.end[within[later]])
        end = np.concatenate([gap.end[inside], ended])
        order = np.argsort(start, kind="stable")
        row, start, end = row[order], start[order], end[order]
        return Waits(row, covered(self._seen[1], start, end), start, end)

    @cached_property
    def starting(self) -> Intervals:
        """When the host was in calls that take so long only the first time.

        Launching takes microseconds: a launch of 5 ms loads code, unless the device is busy: then
        it waits in a full queue. An operator of 50 ms that launches, while the device has nothing
        to do, searches algorithms or makes a context; one that launches nothing computes on the
        host. Having nothing to do means late gaps in half of it or more. Allocations and
        compilations belong here if only the first half of the window shows them.
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
        rows = np.flatnonzero(long)
        idle = covered(self.late_gaps, self.start[rows], self.end[rows])
        long[rows[2 * idle < longest[rows]]] = False
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
    def _copying(self) -> Intervals:
        """When the host was in calls that copy from pageable memory to the device."""
        own = (self.spans.kind == MEMORY_COPY) & self.named("HtoD") & self.named("Pageable")
        launch = self.launch[own]
        launch = launch[launch != ABSENT]
        return union(self.start[launch], self.end[launch])

    @cached_property
    def scores(self) -> Flags:
        """Kernels between the two products of an attention that writes its scores to memory."""
        which = np.zeros(self.length.size, dtype=np.bool_)
        order = np.flatnonzero((self.spans.kind == COMPUTE) & (self.spans.lane == self.main_lane))
        soft = np.flatnonzero(self.kernels("softmax")[order])
        product = np.flatnonzero(self.kernels("product")[order])
        place = np.searchsorted(product, soft)
        has = (place > 0) & (place < product.size)
        soft, place = soft[has], place[has]
        before, after = product[place - 1], product[place]
        near = (soft - before <= NEAR_SOFTMAX) & (after - soft <= NEAR_SOFTMAX)
        for low, high in zip(before[near].tolist(), after[near].tolist(), strict=True):
            which[order[low + 1 : high]] = True
        return which

    @cached_property
    def tensor_by_tensor(self) -> Flags:
        """Elementwise kernels of an optimizer that updates tensor by tensor; none for another."""
        inside = self.launched_in("updating")
        many = self.kernels("foreach", "fused update")
        single = inside & self.kernels("elementwise") & ~many
        enough = single.sum() / (self.num_steps or 1.0) >= MANY_UPDATES
        return single if enough and single.sum() > (inside & many).sum() else np.zeros_like(single)

    @cached_property
    def _seen(self) -> tuple[dict[str, Intervals], Intervals]:
        """Late gaps by what the host does in them; and those that are left."""
        overhead = self.category("overhead")
        asked = {
            "loading": self.host_time("loading"),
            "starting": self.starting,
            "compiling": self.host_time("compiling"),
            "collecting": self.host_time("collecting"),
            "saving": self.host_time("saving"),
            "allocating": self.host_time("allocating"),
            "profiling": union(self.start[overhead], self.end[overhead]),
            "copying": self._copying,
        }
        left, claimed = self.late_gaps, {}
        for cause, when in asked.items():
            claimed[cause] = intersect(left, when)
            left = subtract(left, claimed[cause])
        return claimed, left

    @cached_property
    def aftermath(self) -> Waits:
        """Gaps after a wait that a host further ahead would not have had, and their waits.

        A host that waits for `w` launches everything after it by `w` later. Of the gaps that
        follow, with no cause of their own, `w` less the gap in the wait itself is therefore its
        consequence; until the next wait, or until the host is as far ahead as `w` again.
        """
        first = self.waits
        if not first.row.size:
            return first
        left = subtract(self._seen[1], union(first.gap_start, first.gap_end))
        calls, lost = np.unique(first.row, return_inverse=True)
        order = np.argsort(self.end[calls], kind="stable")
        began, ended = self.start[calls][order], self.end[calls][order]
        budget = ended - began - np.bincount(lost, first.cost_ns, calls.size)[order].astype(int)
        of = np.searchsorted(ended, left.start, side="right") - 1
        own = (of >= 0) & (left.start < self._caught_up(began, ended)[of])
        start, of = left.start[own], of[own]
        length = left.end[own] - start
        # What the gaps of one wait have taken of its budget before each: sums within the wait.
        before = np.cumsum(length) - length
        before -= before[np.searchsorted(of, of, side="left")]
        cost = np.clip(budget[of] - before, 0, length)
        some = cost > 0
        end = start + cost
        return Waits(calls[order][of[some]], cost[some], start[some], end[some])

    def _caught_up(self, began: Ints, ended: Ints) -> Ints:
        """When, after each wait, a span starts that was launched as long ahead as the wait took."""
        moment = np.full(ended.size, np.iinfo(np.int64).max)
        known = self.launch != ABSENT
        start = self.spans.start[known]
        launched = self.start[self.launch[known]]
        of = np.searchsorted(ended, launched, side="right") - 1
        ahead = (of >= 0) & (start - launched >= (ended - began)[of])
        np.minimum.at(moment, of[ahead], start[ahead])
        return moment

    @cached_property
    def claims(self) -> dict[str, Intervals]:
        """Late gaps by cause; each moment is in one of them."""
        claimed, left = self._seen
        waits, after = self.waits, self.aftermath
        waiting = intersect(left, union(waits.gap_start, waits.gap_end))
        left = subtract(left, waiting)
        regions = self.launches.launch_bound
        bound = (np.array([one[at] for one in regions], dtype=np.int64) for at in (0, 1))
        later = union(after.gap_start, after.gap_end)
        left = subtract(left, later)
        ended = self.late & self.tensor_by_tensor[self.ending] if self.ending.size else self.late
        updating = intersect(left, Intervals(self.gaps.start[ended], self.gaps.end[ended]))
        left = subtract(left, updating)
        launching = intersect(left, union(*bound))
        return {
            **claimed, "waiting": waiting, "after waiting": later, "updating": updating,
            "launching": launching, "rest": subtract(left, launching),
        }  # fmt: skip

    def claimed_ns(self, cause: str) -> int:
        """How much of the late gaps one cause has."""
        return measure(self.claims[cause])
