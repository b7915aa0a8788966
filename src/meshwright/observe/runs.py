"""A whole run at a glance: every rank summed up, the ranks compared, findings ranked.

Ranks are read one after another and only summaries stay in memory, with the rows that comparing
ranks needs; above a bound of those, only collectives are compared.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.analyze.clocks import Clocks, on_one_clock
from meshwright.observe.analyze.collective_expected import (
    Expected,
    cluster_of,
    expected,
    nodes_of,
)
from meshwright.observe.analyze.collectives import SizeRow, by_size
from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.selection import for_comparing, of_steps, with_rank
from meshwright.observe.analyze.stragglers import Stragglers, stragglers
from meshwright.observe.analyze.strips import Strip, strip_of
from meshwright.observe.analyze.summary import RankSummary, summary_of
from meshwright.observe.finding import Finding
from meshwright.timeline.readers.cache import Cache
from meshwright.timeline.readers.traces import Reading, choose_traces, empty_traces, map_files
from meshwright.timeline.schema import Kind
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.observe.findings import Examined

_T = TypeVar("_T")
MOST_COMPARED = 4_000_000
"""Rows that are kept to compare ranks, at about 60 bytes each; beyond it, collectives only."""
MOST_STRIPS, MOST_KEPT = 8, 64
"""Ranks of which a small picture is shown, and of which one is kept until it is known which."""


GUESSED = re.compile("says no rank|^one process drives")
"""Notes of ranks whose number was not the trace's own."""


class Wanted(NamedTuple):
    """Which part of a run is looked at."""

    ranks: frozenset[int] = frozenset()
    """Only these; all where there are none."""
    steps: frozenset[int] = frozenset()
    """Only these, whole; what `Extent` says where there are none."""


class KernelSum(NamedTuple):
    """A kernel over all ranks that show it."""

    name: str
    kind: Kind
    ms_per_step: float
    """Mean over the ranks."""
    calls_per_step: float
    share: float
    """Of the time in which devices were busy."""
    mean_us: float
    max_us: float
    peak_share: float | None
    """Of the device's peak, of the rank that took longest."""
    slowest_rank: int
    num_ranks: int


class Collective(NamedTuple):
    """Collectives of one group, kind and size, with what they should have reached."""

    row: SizeRow
    expected: Expected | None


class Compared(NamedTuple):
    """What only several ranks together say."""

    clocks: Clocks
    stragglers: Stragglers
    collectives: tuple[Collective, ...]
    num_mismatches: int
    only_collectives: bool
    """Whether compute was left out, for want of memory: then causes are not told."""


class Overview(NamedTuple):
    """A run at a glance."""

    path: str
    ranks: tuple[RankSummary, ...]
    """By rank."""
    kernels: tuple[KernelSum, ...]
    """Those that take longest first."""
    compared: Compared | None
    """None for a single rank."""
    findings: tuple[Finding, ...] | None
    """The most costly first; None where they were not asked for."""
    strips: tuple[Strip, ...]
    """Pictures of some ranks; none where they were not asked for."""
    damaged: tuple[str, ...]
    """Files that broke off or are empty, in words; what they held until there is counted."""


class Looked(NamedTuple):
    """What is kept of one rank."""

    summary: RankSummary
    kept: Timeline
    """The rows that comparing ranks needs."""
    examined: "Examined | None"
    strip: Strip | None


class Look(NamedTuple):
    """What is asked of every rank; may run in another process."""

    wanted: Wanted = Wanted()
    pictures: bool = False
    findings: bool = True
    alone: bool = False
    """Whether there is one file only: then a rank of it has none to be compared with."""

    def at(self, timeline: Timeline) -> tuple[Looked | int, ...]:
        """Sum up the ranks of one timeline; of a rank that is not wanted, its number."""
        parts = [(part, whole) for whole in timeline.by_rank() for part in per_device(whole)]
        alone = self.alone and len(parts) == 1
        return tuple(self._rank(part, whole, alone) for part, whole in parts)

    def _rank(self, part: Timeline, whole: Timeline, alone: bool) -> Looked | int:
        rank = part.ranks[0]
        if self.wanted.ranks and rank not in self.wanted.ranks:
            return rank
        if self.wanted.steps:
            same = part is whole
            part = of_steps(part, self.wanted.steps)
            whole = part if same else of_steps(whole, self.wanted.steps)
        # One path is enough for the screen, and it is the dearest figure of all.
        first = alone or rank == min(self.wanted.ranks, default=0)
        kept = _empty(part) if alone else for_comparing(part)
        return Looked(
            summary_of(part, path_in=whole if first else None),
            kept,
            _examined(part, kept) if self.findings else None,
            strip_of(part) if self.pictures else None,
        )


def _empty(part: Timeline) -> Timeline:
    nothing = {"spans": part.spans.slice(0, 0), "counters": part.counters.slice(0, 0)}
    return msgspec.structs.replace(part, **nothing)


def _examined(part: Timeline, kept: Timeline) -> "Examined":
    from meshwright.observe.findings import Rank, examine

    return examine(Rank(part), kept)


def overview(
    trace: str | Path | Timeline,
    *,
    wanted: Wanted | None = None,
    jobs: int = 1,
    on_ray: bool = False,
    capture: int | None = None,
    cache: Cache | None = None,
    pictures: bool = False,
    findings: bool = True,
) -> Overview:
    """Look at a trace, at a folder with one per rank, or at what was read or simulated already."""
    if isinstance(trace, Timeline):
        look = Look(wanted or Wanted(), pictures, findings, alone=True)
        return _together("timeline", look, [look.at(trace)])
    files = choose_traces(trace, capture)
    look = Look(wanted or Wanted(), pictures, findings, alone=len(files) == 1)
    reading = Reading(jobs, on_ray, detail="shapes", cache=cache)
    damaged = list(empty_traces(trace))
    looked = map_files(look.at, files, reading)
    found = _together(str(trace), look, _until_damage(looked, damaged))
    return found._replace(damaged=tuple(damaged))


def _together(label: str, look: Look, files: Iterable[tuple[Looked | int, ...]]) -> Overview:
    kept = _Kept()
    for looked in files:
        for one in looked:
            kept.add(one, label)
    if not kept.ranks:
        raise _nothing(label, kept.others)
    ranks = sorted(kept.ranks.values(), key=lambda one: one.summary.rank)
    summaries = tuple(one.summary for one in ranks)
    findings = _combined(ranks) if look.findings else None
    strips = [one.strip for one in ranks if one.strip is not None]
    return Overview(
        path=label,
        ranks=summaries,
        kernels=_kernels(summaries),
        compared=_compared([one.kept for one in ranks], kept.thin),
        findings=findings,
        strips=_shown(strips, findings or ()),
        damaged=(),
    )


def _shown(strips: Sequence[Strip], findings: Sequence[Finding]) -> tuple[Strip, ...]:
    """The pictures of ranks that findings point at, costliest first, then of the first ranks."""
    told = [rank for one in findings for rank in (*(span[0] for span in one.spans), *one.ranks[:1])]
    order = {rank: place for place, rank in reversed(list(enumerate(told)))}
    chosen = sorted(strips, key=lambda strip: (order.get(strip.rank, len(told)), strip.rank))
    return tuple(sorted(chosen[:MOST_STRIPS], key=lambda strip: strip.rank))


def _combined(ranks: Sequence[Looked]) -> tuple[Finding, ...]:
    from meshwright.observe.findings import combine

    return combine(one.examined for one in ranks if one.examined is not None)


class _Kept:
    """The ranks so far, with a bound on what is kept of them."""

    def __init__(self) -> None:
        self.ranks: dict[int, Looked] = {}
        self.others: list[int] = []
        self.thin = False
        self._rows = 0
        self._strips = 0

    def add(self, one: Looked | int, label: str) -> None:
        """Keep one rank, or only that it is there."""
        if isinstance(one, int):
            self.others.append(one)
            return
        rank = one.summary.rank
        if rank in self.ranks:
            if not any(GUESSED.search(note) for note in one.summary.notes):
                what = f"holds two traces of rank {rank}"
                fix = "analyse one of them alone, or compare the two with mw diff"
                raise InputError([Problem(label, what, fix)])
            free = next(number for number in count() if number not in self.ranks)
            one = _renumbered(one, free)
        if one.strip is not None:
            self._strips += 1
            one = one if self._strips <= MOST_KEPT else one._replace(strip=None)
        self.ranks[one.summary.rank] = _thinned(one) if self.thin else one
        self._rows += one.kept.num_spans
        if self._rows > MOST_COMPARED and not self.thin:
            self.thin = True
            self.ranks = {rank: _thinned(own) for rank, own in self.ranks.items()}


def _thinned(one: Looked) -> Looked:
    kept = for_comparing(one.kept, only_collectives=True)
    examined = one.examined._replace(kept=kept) if one.examined is not None else None
    return one._replace(kept=kept, examined=examined)


_OF_RANK = (
    "steps", "breakdown", "overlap", "whole_steps", "idle", "launches", "mfu", "regions",
)  # fmt: skip
"""Parts of a summary that have the rank's number themselves."""


def _renumbered(one: Looked, rank: int) -> Looked:
    """The same under another number: the trace said none, and the guess was taken."""
    own = one.summary
    parts = {name: getattr(own, name)._replace(rank=rank) for name in _OF_RANK}
    kept = with_rank(one.kept, rank)
    examined = one.examined
    if examined is not None:
        examined = examined._replace(summary=examined.summary._replace(rank=rank), kept=kept)
    strip = one.strip._replace(rank=rank) if one.strip is not None else None
    return Looked(own._replace(rank=rank, **parts), kept, examined, strip)


def _compared(kept: Sequence[Timeline], thin: bool) -> Compared | None:
    """What the ranks together say; None for one rank alone."""
    if len(kept) < 2:
        return None
    whole, matched, clocks = on_one_clock(*kept)
    rows = by_size(matched)
    cluster = cluster_of(whole)
    by_row: dict[SizeRow, Expected] = {}
    if cluster is not None:
        by_row = {one.row: one for one in expected(rows, cluster, nodes_of(whole))}
    return Compared(
        clocks,
        stragglers(whole, matched),
        tuple(Collective(row, by_row.get(row)) for row in rows),
        len(matched.mismatches),
        thin,
    )


def _until_damage(files: Iterator[_T], damaged: list[str]) -> Iterator[_T]:
    try:
        yield from files
    except DamagedFile as damage:
        damaged += [str(problem) for problem in damage.problems]


def _nothing(label: str, others: Sequence[int]) -> InputError:
    if others:
        known = ", ".join(map(str, sorted(set(others))))
        return InputError([Problem(label, "has none of these ranks", f"name some of {known}")])
    return InputError([Problem(label, "holds no spans", "record some steps with the profiler on")])


def _kernels(ranks: Sequence[RankSummary]) -> tuple[KernelSum, ...]:
    """The kernel tables of all ranks as one."""
    rows = defaultdict(list)
    for one in ranks:
        for kernel in one.kernels:
            rows[kernel.name, kernel.kind].append((one, kernel))
    busy = sum(one.per_step_ms(one.whole_steps.busy_ns) for one in ranks)
    found = []
    for (name, kind), own in rows.items():
        total = sum(one.per_step_ms(kernel.total_ns) for one, kernel in own)
        calls = sum(kernel.num_launches / max(one.num_steps, 1) for one, kernel in own)
        slowest, longest = max(own, key=lambda item: item[0].per_step_ms(item[1].total_ns))
        launches = sum(kernel.num_launches for _, kernel in own)
        found.append(
            KernelSum(
                name=name,
                kind=kind,
                ms_per_step=total / len(ranks),
                calls_per_step=calls / len(ranks),
                share=total / busy if busy else 0.0,
                mean_us=sum(kernel.total_ns for _, kernel in own) / launches / 1e3,
                max_us=max(kernel.max_ns for _, kernel in own) / 1e3,
                peak_share=longest.peak_share,
                slowest_rank=slowest.rank,
                num_ranks=len(own),
            )
        )
    return tuple(sorted(found, key=lambda kernel: -kernel.ms_per_step))
