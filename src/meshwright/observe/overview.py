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
from meshwright.observe.analyze.collectives.clock_alignment import ClockAlignment, align_ranks
from meshwright.observe.analyze.collectives.expected_bandwidth import (
    ExpectedCollective,
    find_catalog_cluster,
    infer_node_placement,
    predict_expected_collectives,
)
from meshwright.observe.analyze.collectives.matched_collectives import (
    CollectiveSizeRow,
    sum_by_size,
)
from meshwright.observe.analyze.collectives.stragglers import Stragglers, find_stragglers
from meshwright.observe.analyze.rank_summary import RankSummary, summarize_rank
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.row_selection import (
    renumber_rank,
    select_comparison_rows,
    select_steps,
)
from meshwright.observe.analyze.timeline_strip import TimelineStrip, build_strip
from meshwright.observe.finding import Finding
from meshwright.timeline.readers.parsing.inferred_rank import INFERRED_RANK_NOTE_PREFIX
from meshwright.timeline.readers.trace_cache import TraceCache
from meshwright.timeline.readers.trace_folder import (
    FolderReadOptions,
    choose_traces,
    find_empty_traces,
    map_trace_files,
)
from meshwright.timeline.schema import SpanKind
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.observe.findings import RankDetections

_T = TypeVar("_T")
MAX_COMPARED_ROWS = 4_000_000
"""Rows that are kept to compare ranks, at about 60 bytes each; beyond it, collectives only."""
MAX_STRIPS, MAX_KEPT_STRIPS = 8, 64
"""Ranks of which a small picture is shown, and of which one is kept until it is known which."""


INFERRED_RANK_NOTE = re.compile(f"^{INFERRED_RANK_NOTE_PREFIX}|^one process drives")
"""Notes of ranks whose number was not the trace's own."""


class TraceSelection(NamedTuple):
    """Which part of a run is looked at."""

    ranks: frozenset[int] = frozenset()
    """Only these; all where there are none."""
    steps: frozenset[int] = frozenset()
    """Only these, whole; what `AnalysisExtent` says where there are none."""


class KernelTotals(NamedTuple):
    """A kernel over all ranks that show it."""

    name: str
    kind: SpanKind
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


class CollectiveComparison(NamedTuple):
    """Collectives of one group, kind and size, with what they should have reached."""

    row: CollectiveSizeRow
    expected: ExpectedCollective | None


class RankComparison(NamedTuple):
    """What only several ranks together say."""

    clocks: ClockAlignment
    stragglers: Stragglers
    collectives: tuple[CollectiveComparison, ...]
    num_mismatches: int
    only_collectives: bool
    """Whether compute was left out, for want of memory: then causes are not told."""


class RunOverview(NamedTuple):
    """A run at a glance."""

    path: str
    ranks: tuple[RankSummary, ...]
    """By rank."""
    kernels: tuple[KernelTotals, ...]
    """Those that take longest first."""
    rank_comparison: RankComparison | None
    """None for a single rank."""
    findings: tuple[Finding, ...] | None
    """The most costly first; None where they were not asked for."""
    strips: tuple[TimelineStrip, ...]
    """Pictures of some ranks; none where they were not asked for."""
    damaged: tuple[str, ...]
    """Files that broke off or are empty, in words; what they held until there is counted."""


class RankAnalysis(NamedTuple):
    """What is kept of one rank."""

    summary: RankSummary
    comparison_rows: Timeline
    """The rows that comparing ranks needs."""
    detections: "RankDetections | None"
    strip: TimelineStrip | None


class RankAnalyzer(NamedTuple):
    """What is asked of every rank; may run in another process."""

    selection: TraceSelection = TraceSelection()
    with_strips: bool = False
    with_findings: bool = True
    is_single_file: bool = False
    """Whether there is one file only: then a rank of it has none to be compared with."""

    def analyze(self, timeline: Timeline) -> tuple[RankAnalysis | int, ...]:
        """Sum up the ranks of one timeline; of a rank that is not wanted, its number."""
        parts = [
            (part, whole) for whole in timeline.split_by_rank() for part in split_by_device(whole)
        ]
        alone = self.is_single_file and len(parts) == 1
        return tuple(self._rank(part, whole, alone) for part, whole in parts)

    def _rank(self, part: Timeline, whole: Timeline, alone: bool) -> RankAnalysis | int:
        rank = part.ranks[0]
        if self.selection.ranks and rank not in self.selection.ranks:
            return rank
        if self.selection.steps:
            same = part is whole
            part = select_steps(part, self.selection.steps)
            whole = part if same else select_steps(whole, self.selection.steps)
        # One path is enough for the screen, and it is the dearest figure of all.
        first = alone or rank == min(self.selection.ranks, default=0)
        kept = _empty(part) if alone else select_comparison_rows(part)
        return RankAnalysis(
            summarize_rank(part, path_in=whole if first else None),
            kept,
            _examined(part, kept) if self.with_findings else None,
            build_strip(part) if self.with_strips else None,
        )


def _empty(part: Timeline) -> Timeline:
    nothing = {"spans": part.spans.slice(0, 0), "counters": part.counters.slice(0, 0)}
    return msgspec.structs.replace(part, **nothing)


def _examined(part: Timeline, kept: Timeline) -> "RankDetections":
    from meshwright.observe.findings import RankContext, detect_on_rank

    return detect_on_rank(RankContext(part), kept)


def analyze_run(
    trace: str | Path | Timeline,
    *,
    selection: TraceSelection | None = None,
    num_workers: int = 1,
    use_ray: bool = False,
    capture: int | None = None,
    cache: TraceCache | None = None,
    with_strips: bool = False,
    with_findings: bool = True,
) -> RunOverview:
    """Look at a trace, at a folder with one per rank, or at what was read or simulated already."""
    if isinstance(trace, Timeline):
        analyzer = RankAnalyzer(
            selection or TraceSelection(), with_strips, with_findings, is_single_file=True
        )
        return _together("timeline", analyzer, [analyzer.analyze(trace)])
    files = choose_traces(trace, capture)
    analyzer = RankAnalyzer(
        selection or TraceSelection(), with_strips, with_findings, is_single_file=len(files) == 1
    )
    reading = FolderReadOptions(num_workers, use_ray, detail="shapes", cache=cache)
    damaged = list(find_empty_traces(trace))
    analyses = map_trace_files(analyzer.analyze, files, reading)
    found = _together(str(trace), analyzer, _until_damage(analyses, damaged))
    return found._replace(damaged=tuple(damaged))


def _together(
    label: str, look: RankAnalyzer, files: Iterable[tuple[RankAnalysis | int, ...]]
) -> RunOverview:
    kept = _RankCollector()
    for looked in files:
        for one in looked:
            kept.add(one, label)
    if not kept.ranks:
        raise _nothing(label, kept.others)
    ranks = sorted(kept.ranks.values(), key=lambda one: one.summary.rank)
    summaries = tuple(one.summary for one in ranks)
    findings = _combined(ranks) if look.with_findings else None
    strips = [one.strip for one in ranks if one.strip is not None]
    return RunOverview(
        path=label,
        ranks=summaries,
        kernels=_kernels(summaries),
        rank_comparison=_compared([one.comparison_rows for one in ranks], kept.thin),
        findings=findings,
        strips=_shown(strips, findings or ()),
        damaged=(),
    )


def _shown(
    strips: Sequence[TimelineStrip], findings: Sequence[Finding]
) -> tuple[TimelineStrip, ...]:
    """The pictures of ranks that findings point at, costliest first, then of the first ranks."""
    told = [rank for one in findings for rank in (*(span[0] for span in one.spans), *one.ranks[:1])]
    order = {rank: place for place, rank in reversed(list(enumerate(told)))}
    chosen = sorted(strips, key=lambda strip: (order.get(strip.rank, len(told)), strip.rank))
    return tuple(sorted(chosen[:MAX_STRIPS], key=lambda strip: strip.rank))


def _combined(ranks: Sequence[RankAnalysis]) -> tuple[Finding, ...]:
    from meshwright.observe.findings import merge_ranks

    return merge_ranks(one.detections for one in ranks if one.detections is not None)


class _RankCollector:
    """The ranks so far, with a bound on what is kept of them."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankAnalysis] = {}
        self.others: list[int] = []
        self.thin = False
        self._rows = 0
        self._strips = 0

    def add(self, one: RankAnalysis | int, label: str) -> None:
        """Keep one rank, or only that it is there."""
        if isinstance(one, int):
            self.others.append(one)
            return
        rank = one.summary.rank
        if rank in self.ranks:
            if not any(INFERRED_RANK_NOTE.search(note) for note in one.summary.notes):
                what = f"holds two traces of rank {rank}"
                fix = "analyse one of them alone, or compare the two with mw diff"
                raise InputError([Problem(label, what, fix)])
            free = next(number for number in count() if number not in self.ranks)
            one = _renumbered(one, free)
        if one.strip is not None:
            self._strips += 1
            one = one if self._strips <= MAX_KEPT_STRIPS else one._replace(strip=None)
        self.ranks[one.summary.rank] = _thinned(one) if self.thin else one
        self._rows += one.comparison_rows.num_spans
        if self._rows > MAX_COMPARED_ROWS and not self.thin:
            self.thin = True
            self.ranks = {rank: _thinned(own) for rank, own in self.ranks.items()}


def _thinned(one: RankAnalysis) -> RankAnalysis:
    kept = select_comparison_rows(one.comparison_rows, only_collectives=True)
    examined = one.detections._replace(comparison_rows=kept) if one.detections is not None else None
    return one._replace(comparison_rows=kept, detections=examined)


_OF_RANK = (
    "steps",
    "breakdown",
    "overlap",
    "complete_steps_breakdown",
    "idle",
    "launches",
    "mfu",
    "regions",
)
"""Parts of a summary that have the rank's number themselves."""


def _renumbered(one: RankAnalysis, rank: int) -> RankAnalysis:
    """The same under another number: the trace said none, and the guess was taken."""
    own = one.summary
    parts = {name: getattr(own, name)._replace(rank=rank) for name in _OF_RANK}
    kept = renumber_rank(one.comparison_rows, rank)
    examined = one.detections
    if examined is not None:
        examined = examined._replace(
            totals=examined.totals._replace(rank=rank), comparison_rows=kept
        )
    strip = one.strip._replace(rank=rank) if one.strip is not None else None
    return RankAnalysis(own._replace(rank=rank, **parts), kept, examined, strip)


def _compared(kept: Sequence[Timeline], thin: bool) -> RankComparison | None:
    """What the ranks together say; None for one rank alone."""
    if len(kept) < 2:
        return None
    whole, matched, clocks = align_ranks(*kept)
    rows = sum_by_size(matched)
    cluster = find_catalog_cluster(whole)
    by_row: dict[CollectiveSizeRow, ExpectedCollective] = {}
    if cluster is not None:
        by_row = {
            one.row: one
            for one in predict_expected_collectives(rows, cluster, infer_node_placement(whole))
        }
    return RankComparison(
        clocks,
        find_stragglers(whole, matched),
        tuple(CollectiveComparison(row, by_row.get(row)) for row in rows),
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


def _kernels(ranks: Sequence[RankSummary]) -> tuple[KernelTotals, ...]:
    """The kernel tables of all ranks as one."""
    rows = defaultdict(list)
    for one in ranks:
        for kernel in one.kernels:
            rows[kernel.name, kernel.kind].append((one, kernel))
    busy = sum(one.per_step_ms(one.complete_steps_breakdown.busy_ns) for one in ranks)
    found = []
    for (name, kind), own in rows.items():
        total = sum(one.per_step_ms(kernel.total_ns) for one, kernel in own)
        calls = sum(kernel.num_launches / max(one.num_steps, 1) for one, kernel in own)
        slowest, longest = max(own, key=lambda item: item[0].per_step_ms(item[1].total_ns))
        launches = sum(kernel.num_launches for _, kernel in own)
        found.append(
            KernelTotals(
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
