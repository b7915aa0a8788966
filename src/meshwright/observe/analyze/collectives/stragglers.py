"""Which rank, or which few together, the others wait for, how much, and why they come late.

A rank arrives late at a collective because it computed longer, had nothing to compute (its host was
late, or waited for data), or because the collective before took its links longer. What lies between
two collectives is compared with what the other members did there at the same time.
"""

import re
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.collectives.matched_collectives import (
    MatchedCollectives,
    match_collectives,
)
from meshwright.observe.analyze.collectives.slow_ranks import (
    SlowLink,
    find_slow_links,
    measure_kernel_slowdowns,
)
from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import (
    COMPUTE,
    MEMORY_COPY,
    Flags,
    Ints,
    match_values,
    measure_covered_ns,
    union,
)
from meshwright.observe.analyze.spans.steps import find_steps
from meshwright.timeline.memo import memoize
from meshwright.timeline.timeline import Timeline

MIN_STRAGGLER_SHARE = 0.01
"""Less than this part of the time is no straggling."""
SLOW_KERNEL_RATIO = 1.03
"""Kernels that take so many times as long as the same ones elsewhere are slow."""
SHARED_LATENESS_RATIO = 0.7
"""Ranks are late together that come late in so much of what their collectives wait."""
_DATA = re.compile(r"(?i)data_?loader|enumerate\(|__next__|next_data|load_batch|data_?loading")


class RankStragglerStats(NamedTuple):
    """How a rank came to the collectives it shares."""

    rank: int
    num_collectives: int
    num_times_last: int
    num_times_first: int
    wait_ns: int
    """What it waited for others."""
    caused_wait_ns: int
    """What all others together waited where it came last."""
    avoidable_wait_ns: int
    """By how much it came after the last but one: what others could save without it, at most."""
    avoidable_wait_with_group_ns: int
    """The same beside all that are late together with it."""
    extra_compute_ns: int
    """More time in kernels than the others' median, where it came last."""
    extra_idle_ns: int
    """More time without work than the others' median, where it came last."""
    extra_data_wait_ns: int
    """The part of that idle time in which its host waited for data."""
    kernel_slowdown: float
    """How many times as long its kernels take as those of the same names on the other ranks."""

    @property
    def cause(self) -> str:
        """`compute` slower kernels, `work` more of them, `data`, `host`; empty if never last."""
        if (
            self.avoidable_wait_with_group_ns <= 0
            or max(self.extra_compute_ns, self.extra_idle_ns) <= 0
        ):
            return ""
        if self.extra_compute_ns >= self.extra_idle_ns:
            return "compute" if self.kernel_slowdown >= SLOW_KERNEL_RATIO else "work"
        return "data" if self.extra_data_wait_ns > self.extra_idle_ns / 2 else "host"


class StepStraggler(NamedTuple):
    """Who held up a step most."""

    step: int
    rank: int
    avoidable_wait_ns: int


class Stragglers(NamedTuple):
    """What ranks lose by waiting for each other."""

    ranks: tuple[RankStragglerStats, ...]
    """Those that cost most first."""
    span_ns: int
    """From the first arrival to the last end of a collective."""
    step_stragglers: tuple[StepStraggler, ...]
    pattern: str
    """`none`, `one rank`, `some ranks`, `rotating`, or `few steps`."""
    slow_links: tuple[SlowLink, ...]
    straggler_ranks: tuple[int, ...]
    """The ranks that hold up the others; more than one where some come late together."""

    @property
    def single_straggler(self) -> int | None:
        """The rank that holds up the others; None where no single one does."""
        return self.straggler_ranks[0] if len(self.straggler_ranks) == 1 else None


@memoize
def find_stragglers(
    timeline: Timeline, collectives: MatchedCollectives | None = None
) -> Stragglers:
    """Say who comes late, how often and why; clocks must agree (see `clock_alignment`)."""
    found = match_collectives(timeline) if collectives is None else collectives
    members, calls = found.members, found.calls
    if not calls.op.size:
        return Stragglers((), 0, (), "none", (), ())
    lead, is_last = _leads(found)
    more = {name: _excess(found, own) for name, own in _between(timeline, found).items()}
    slowdown = measure_kernel_slowdowns(timeline)
    waits, last, first = found.wait_ns, found.last_rank, found.first_rank
    span = int(members.end_ns.max() - members.start_ns.min())
    by_step = _by_step(timeline, found, lead)
    leads = {rank: int(lead[last == rank].sum()) for rank in np.unique(members.rank).tolist()}
    # What the rank loses that loses most: groups that run side by side do not add up.
    lost = np.bincount(np.searchsorted(list(leads), members.rank), lead[members.call_index]).max()
    pattern = _pattern(leads, by_step, lost >= MIN_STRAGGLER_SHARE * span)
    late: tuple[int, ...] = ()
    if pattern in ("one rank", "few steps"):
        late = (max(leads, key=lambda rank: (leads[rank], -rank)),)
    behind = {rank: (is_last & (lead[members.call_index] > 0), leads[rank]) for rank in leads}
    if pattern in ("none", "rotating"):
        together = _together(found, span)
        late = tuple(sorted(together))
        behind |= together
        pattern = "some ranks" if late else pattern
    ranks = []
    for rank, own_lead in leads.items():
        own = members.rank == rank
        apart = own & behind[rank][0]
        others = ~np.isin(members.rank, [rank, *late]) if rank in late else ~own
        others &= np.isin(members.call_index, members.call_index[apart])
        excess = {name: values[apart].sum() for name, values in more.items()}
        ranks.append(
            RankStragglerStats(
                rank=rank,
                num_collectives=int(own.sum()),
                num_times_last=int((last == rank).sum()),
                num_times_first=int((first == rank).sum()),
                wait_ns=int(waits[own].sum()),
                caused_wait_ns=int(waits[others].sum()),
                avoidable_wait_ns=own_lead,
                avoidable_wait_with_group_ns=behind[rank][1],
                extra_compute_ns=int(max(0, excess["compute"])),
                extra_idle_ns=int(max(0, excess["idle"])),
                extra_data_wait_ns=int(max(0, excess["data"])),
                kernel_slowdown=slowdown.get(rank, 1.0),
            )
        )
    ranks.sort(key=lambda one: (one.rank not in late, -one.avoidable_wait_with_group_ns, one.rank))
    return Stragglers(tuple(ranks), span, by_step, pattern, find_slow_links(found), late)


def _together(found: MatchedCollectives, span_ns: int) -> dict[int, tuple[Flags, int]]:
    """Ranks that come late together, with where they do and by how much; none where none do.

    Arrivals at a collective are parted where the gap is widest, half of the members or fewer being
    late. A slow node, or two slow ranks, are late most of the time; who is late by chance is not.
    """
    members, calls = found.members, found.calls
    order = np.lexsort((members.rank, members.start_ns, members.call_index))
    starts, call = members.start_ns[order], members.call_index[order]
    place = np.arange(order.size) - calls.first_member[call]
    gap = np.append(0, np.diff(starts))
    gap[place < calls.num_members[call] - calls.num_members[call] // 2] = -1
    widest = np.maximum.reduceat(gap, calls.first_member)
    cut = np.minimum.reduceat(np.where(gap == widest[call], place, order.size), calls.first_member)
    is_late = np.zeros(order.size, dtype=np.bool_)
    is_late[order] = place >= cut[call]
    weight = np.maximum(widest, 0)[members.call_index]
    ranks = np.unique(members.rank)
    number = np.searchsorted(ranks, members.rank)
    there = np.bincount(number, weight, minlength=ranks.size)
    late = np.bincount(number, np.where(is_late, weight, 0), minlength=ranks.size)
    steady = (late >= SHARED_LATENESS_RATIO * there) & (late >= late.max() / 2) & (late > 0)
    if not 1 < steady.sum() <= ranks.size / 2:
        return {}
    # What these explain: collectives at which nobody else is late.
    odd = (
        np.bincount(
            members.call_index, is_late & ~steady[number], minlength=calls.first_member.size
        )
        > 0
    )
    explained = float(np.maximum(widest, 0)[~odd].sum())
    if explained < np.maximum(widest, 0).sum() / 2 or late.max() < MIN_STRAGGLER_SHARE * span_ns:
        return {}
    return {int(ranks[at]): (is_late, int(late[at])) for at in np.flatnonzero(steady).tolist()}


def _leads(found: MatchedCollectives) -> tuple[Ints, Flags]:
    """How long after the last but one the last came, per collective; who that was, per member."""
    members, calls = found.members, found.calls
    order = np.lexsort((members.rank, members.start_ns, members.call_index))
    end = calls.first_member + calls.num_members - 1
    starts = members.start_ns[order]
    is_last = np.zeros(order.size, dtype=np.bool_)
    is_last[order[end]] = True
    lead: Ints = starts[end] - starts[end - 1]
    return lead, is_last


def _between(timeline: Timeline, found: MatchedCollectives) -> dict[str, Ints]:
    """What each member did between its collective before and this one."""
    members = found.members
    values = {
        name: np.zeros(members.call_index.size, dtype=np.int64)
        for name in ("compute", "idle", "data")
    }
    for part in timeline.split_by_rank():
        own = np.flatnonzero(members.rank == int(part.column("rank")[0]))
        own = own[np.argsort(members.start_ns[own], kind="stable")]
        if not own.size:
            continue
        start, end = members.start_ns[own], members.end_ns[own]
        # The first has no collective before it to count from: it is left at nothing.
        begin = np.append(start[0], np.minimum(np.maximum.accumulate(end)[:-1], start[1:]))
        spans = find_device_spans(part)
        busy = measure_covered_ns(spans.intervals_of(COMPUTE, MEMORY_COPY), begin, start)
        values["compute"][own] = busy
        values["idle"][own] = start - begin - busy
        rows = np.flatnonzero(match_values(part.string_column("name"), _DATA.search))
        from_ns = part.column("start_ns")[rows]
        loading = union(from_ns, from_ns + part.column("duration_ns")[rows])
        values["data"][own] = np.minimum(
            measure_covered_ns(loading, begin, start), values["idle"][own]
        )
    return values


def _excess(found: MatchedCollectives, values: Ints) -> Ints:
    """How much more each member has than the median of its collective."""
    calls = found.calls
    order = np.lexsort((values, found.members.call_index))
    low = values[order][calls.first_member + (calls.num_members - 1) // 2]
    high = values[order][calls.first_member + calls.num_members // 2]
    excess: Ints = values - ((low + high) / 2)[found.members.call_index]
    return excess


def _by_step(
    timeline: Timeline, found: MatchedCollectives, lead: Ints
) -> tuple[StepStraggler, ...]:
    """Who held up each step most, by when the last member arrived."""
    marked = next((one for one in find_steps(timeline) if one.steps), None)
    if marked is None:
        return ()
    begins = np.array(
        [one.device_start_ns if one.device_start_ns >= 0 else one.start_ns for one in marked.steps]
    )
    place = np.searchsorted(begins, found.arrival_ns, side="right") - 1
    last = found.last_rank
    leads = []
    for number, step in enumerate(marked.steps):
        own = place == number
        if not own.any():
            continue
        ranks, which = np.unique(last[own], return_inverse=True)
        total = np.bincount(which.reshape(-1), lead[own])
        worst = int(np.argmax(total))
        leads.append(StepStraggler(step.number, int(ranks[worst]), int(total[worst])))
    return tuple(leads)


def _pattern(leads: dict[int, int], by_step: tuple[StepStraggler, ...], matters: bool) -> str:
    """Whether it is always one rank, now this and now that, or a few bad steps."""
    total = sum(leads.values())
    if not total or not matters:
        return "none"
    steps = np.sort(np.array([one.avoidable_wait_ns for one in by_step]))[::-1]
    few = max(1, steps.size // 5)
    if steps.size >= 5 and steps[:few].sum() >= 0.6 * steps.sum():
        return "few steps"
    if max(leads.values()) >= 0.5 * total:
        return "one rank"
    return "rotating"
