"""What detectors ask of one rank: its facts, and why its device is idle.

Gaps in which the device had nothing to do because the host launched late are shared out among
causes in a fixed order, so that no moment is told twice: data, first calls, compilation, garbage
collection, checkpoints, the allocator, the profiler, copies from pageable memory, synchronization,
what follows from it, an optimizer that updates tensor by tensor, launching, the rest. What the host
does in a gap comes before the wait that the gap began in.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.device_time.idle_time import MAX_KERNEL_GAP_NS
from meshwright.observe.analyze.device_time.kernel_classes import classify_host_span
from meshwright.observe.analyze.spans.intervals import (
    COMPUTE,
    MEMORY_COPY,
    Flags,
    Intervals,
    Ints,
    clip,
    find_gaps,
    intersect,
    match_values,
    measure_covered_ns,
    measure_total_ns,
    subtract,
    union,
)
from meshwright.observe.findings.job.rank_facts import RankFacts
from meshwright.timeline.schema import ABSENT

LONG_LAUNCH_NS = 5_000_000
LONG_OPERATOR_NS = 50_000_000
MAX_KERNELS_TO_SOFTMAX = 4
"""So many kernels may stand between a softmax and the GEMMs around it."""
MIN_UNFUSED_UPDATES = 50
"""Kernels per step: an optimizer that launches more for its tensors takes them one by one."""
MIN_SECOND_HALF_SHARE = 0.2
"""What goes on for a whole profile has about half of its cost in the second half."""


def _is_kernel_operator(name: str) -> bool:
    return name.startswith("aten::") and not classify_host_span(name)


class HostWaits(NamedTuple):
    """Calls in which the host waits for the device, and what each costs."""

    row: Ints
    cost_ns: Ints
    """Device idle from the moment it ran dry during the call to its next work; during the call only
    where it had run dry before."""
    gap_start: Ints
    gap_end: Ints


class RankContext(RankFacts, frozen=True, eq=False, dict=True):
    """One rank, and why its device is idle."""

    @cached_property
    def gaps(self) -> Intervals:
        """When the device is idle."""
        return find_gaps(self.spans.intervals_of(), self.spans.window_ns)

    @cached_property
    def gap_end_span(self) -> Ints:
        """The device span that ends each gap."""
        return np.searchsorted(self.spans.start, self.gaps.end, side="left")

    @cached_property
    def is_late_gap(self) -> Flags:
        """Which gaps are there because the host launched late."""
        launch = self.launch_row[self.gap_end_span] if self.gap_end_span.size else self.gap_end_span
        late: Flags = (launch != ABSENT) & (self.start[launch] > self.gaps.start)
        return late

    @cached_property
    def late_gaps(self) -> Intervals:
        """Those gaps."""
        return Intervals(self.gaps.start[self.is_late_gap], self.gaps.end[self.is_late_gap])

    def short_gaps_ns(self, which: Flags) -> int:
        """Gaps before these device spans that are the device's own: launched in time, and short."""
        if not self.gap_end_span.size:
            return 0
        length = self.gaps.end - self.gaps.start
        return int(
            length[
                which[self.gap_end_span] & ~self.is_late_gap & (length < MAX_KERNEL_GAP_NS)
            ].sum()
        )

    @cached_property
    def host_waits(self) -> HostWaits:
        """Calls in which the host waited until the device ran dry."""
        rows = self.host_rows("waiting")
        rows = rows[np.argsort(self.start[rows], kind="stable")]
        gap = self.late_gaps
        if not rows.size or not gap.start.size:
            none = np.zeros(0, dtype=np.int64)
            return HostWaits(none, none, none, none)
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
        return HostWaits(row, measure_covered_ns(self._seen[1], start, end), start, end)

    @cached_property
    def first_call_intervals(self) -> Intervals:
        """When the host was in calls that take so long only the first time.

        Launching takes microseconds: a launch of 5 ms loads code, unless the device is busy: then
        it waits in a full queue. An operator of 50 ms that launches, while the device has nothing
        to do, searches algorithms or makes a context; one that launches nothing computes on the
        host. Having nothing to do means late gaps in half of it or more. Allocations and
        compilations belong here if only the first half of the window shows them.
        """
        names = self.rank_timeline.string_column("name")
        longest = self.end - self.start
        launching = match_values(names, lambda name: "Launch" in name or "FuncGetAttr" in name)
        long = self.is_host & launching & (longest >= LONG_LAUNCH_NS)
        slow = np.flatnonzero(
            self.is_host & (longest >= LONG_OPERATOR_NS) & match_values(names, _is_kernel_operator)
        )
        calls = np.sort(self.start[np.unique(self.launch_row[self.launch_row != ABSENT])])
        inside = np.searchsorted(calls, self.end[slow]) > np.searchsorted(calls, self.start[slow])
        long[slow[inside]] = True
        rows = np.flatnonzero(long)
        idle = measure_covered_ns(self.late_gaps, self.start[rows], self.end[rows])
        long[rows[2 * idle < longest[rows]]] = False
        for sort in ("compiling", "allocating"):
            rows = self.host_rows(sort)
            if rows.size and not self.continues_after_warmup(rows):
                long[rows] = True
        return union(self.start[long], self.end[long])

    def continues_after_warmup(self, rows: Ints) -> bool:
        """Whether the late gaps in these rows are in the second half of the window too."""
        lost = intersect(self.late_gaps, union(self.start[rows], self.end[rows]))
        low, high = self.spans.window_ns
        second = measure_total_ns(clip(lost, ((low + high) // 2, high)))
        return second >= max(1, measure_total_ns(lost)) * MIN_SECOND_HALF_SHARE

    @cached_property
    def _copying(self) -> Intervals:
        """When the host was in calls that copy from pageable memory to the device."""
        own = (
            (self.spans.kind == MEMORY_COPY)
            & self.match_names("HtoD")
            & self.match_names("Pageable")
        )
        launch = self.launch_row[own]
        launch = launch[launch != ABSENT]
        return union(self.start[launch], self.end[launch])

    @cached_property
    def attention_score_kernels(self) -> Flags:
        """Kernels between the two GEMMs of an attention that writes its scores to memory."""
        which = np.zeros(self.duration_ns.size, dtype=np.bool_)
        order = np.flatnonzero((self.spans.kind == COMPUTE) & (self.spans.lane == self.main_stream))
        soft = np.flatnonzero(self.match_kernels("softmax")[order])
        gemm = np.flatnonzero(self.match_kernels("gemm")[order])
        place = np.searchsorted(gemm, soft)
        has = (place > 0) & (place < gemm.size)
        soft, place = soft[has], place[has]
        before, after = gemm[place - 1], gemm[place]
        near = (soft - before <= MAX_KERNELS_TO_SOFTMAX) & (after - soft <= MAX_KERNELS_TO_SOFTMAX)
        for low, high in zip(before[near].tolist(), after[near].tolist(), strict=True):
            which[order[low + 1 : high]] = True
        return which

    @cached_property
    def unfused_optimizer_kernels(self) -> Flags:
        """Elementwise kernels of an optimizer that updates tensor by tensor; none for another."""
        inside = self.match_launched_in("updating")
        many = self.match_kernels("foreach", "fused update")
        single = inside & self.match_kernels("elementwise") & ~many
        enough = single.sum() / (self.num_steps or 1.0) >= MIN_UNFUSED_UPDATES
        return single if enough and single.sum() > (inside & many).sum() else np.zeros_like(single)

    @cached_property
    def _seen(self) -> tuple[dict[str, Intervals], Intervals]:
        """Late gaps by what the host does in them; and those that are left."""
        overhead = self.match_categories("overhead")
        asked = {
            "loading": self.host_intervals("loading"),
            "starting": self.first_call_intervals,
            "compiling": self.host_intervals("compiling"),
            "collecting": self.host_intervals("collecting"),
            "saving": self.host_intervals("saving"),
            "allocating": self.host_intervals("allocating"),
            "profiling": union(self.start[overhead], self.end[overhead]),
            "copying": self._copying,
        }
        left, claimed = self.late_gaps, {}
        for cause, when in asked.items():
            claimed[cause] = intersect(left, when)
            left = subtract(left, claimed[cause])
        return claimed, left

    @cached_property
    def gaps_after_waits(self) -> HostWaits:
        """Gaps after a wait that a host further ahead would not have had, and their waits.

        A host that waits for `w` launches everything after it by `w` later. Of the gaps that
        follow, with no cause of their own, `w` less the gap in the wait itself is therefore its
        consequence; until the next wait, or until the host is as far ahead as `w` again.
        """
        first = self.host_waits
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
        return HostWaits(calls[order][of[some]], cost[some], start[some], end[some])

    def _caught_up(self, began: Ints, ended: Ints) -> Ints:
        """When, after each wait, a span starts that was launched as long ahead as the wait took."""
        moment = np.full(ended.size, np.iinfo(np.int64).max)
        known = self.launch_row != ABSENT
        start = self.spans.start[known]
        launched = self.start[self.launch_row[known]]
        of = np.searchsorted(ended, launched, side="right") - 1
        ahead = (of >= 0) & (start - launched >= (ended - began)[of])
        np.minimum.at(moment, of[ahead], start[ahead])
        return moment

    @cached_property
    def late_gaps_by_cause(self) -> dict[str, Intervals]:
        """Late gaps by cause; each moment is in one of them."""
        claimed, left = self._seen
        waits, after = self.host_waits, self.gaps_after_waits
        waiting = intersect(left, union(waits.gap_start, waits.gap_end))
        left = subtract(left, waiting)
        regions = self.launches.launch_bound_regions
        bound = (np.array([one[at] for one in regions], dtype=np.int64) for at in (0, 1))
        later = union(after.gap_start, after.gap_end)
        left = subtract(left, later)
        ended = (
            self.is_late_gap & self.unfused_optimizer_kernels[self.gap_end_span]
            if self.gap_end_span.size
            else self.is_late_gap
        )
        updating = intersect(left, Intervals(self.gaps.start[ended], self.gaps.end[ended]))
        left = subtract(left, updating)
        launching = intersect(left, union(*bound))
        return {
            **claimed, "waiting": waiting, "after waiting": later, "updating": updating,
            "launching": launching, "rest": subtract(left, launching),
        }  # fmt: skip

    def late_ns_by_cause(self, cause: str) -> int:
        """How much of the late gaps one cause has."""
        return measure_total_ns(self.late_gaps_by_cause[cause])
