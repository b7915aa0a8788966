"""What detectors ask of all ranks together, worked out once and only when asked.

Of each rank only what they need is kept: device work, marks of steps and passes, waits for data.
"""

from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.collectives.clock_alignment import align_ranks
from meshwright.observe.analyze.collectives.expected_bandwidth import (
    ExpectedCollective,
    find_catalog_cluster,
    infer_node_placement,
    predict_expected_collectives,
)
from meshwright.observe.analyze.collectives.matched_collectives import (
    MatchedCollectives,
    sum_by_size,
)
from meshwright.observe.analyze.collectives.stragglers import Stragglers, find_stragglers
from meshwright.observe.analyze.pipeline_bubble import PipelineAnalysis, analyze_pipeline
from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import (
    COMPUTE,
    Flags,
    Ints,
    measure_covered_ns,
    measure_total_ns,
    union,
)
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.timeline.timeline import Timeline

MAX_LATE_INTERVALS = 5


class RankTotals(NamedTuple):
    """One rank in short."""

    rank: int
    window_ns: int
    num_steps: float | None
    compute_ns: int
    exposed_communication_ns: int
    late_ns: int
    """Idle because the host launched late."""
    data_loading_ns: int
    """The part of that in which the host waited for data."""
    kernel_ns: dict[str, int]
    """Time of each compute kernel that has a hundredth of compute time or more."""
    num_spans: int
    """Device spans that are counted."""
    is_training: bool
    is_rocm: bool
    framework: str
    """The trainer or serving engine that it shows; empty for none."""


def sum_rank_totals(rank: RankContext) -> RankTotals:
    """Sum up one rank."""
    computing = rank.spans.kind == COMPUTE
    names, length = rank.spans.name[computing], rank.duration_ns[computing]
    total = np.bincount(names, length, minlength=1)
    large = np.flatnonzero(total >= max(1.0, total.sum() / 100))
    return RankTotals(
        rank.rank,
        rank.window_ns,
        rank.num_steps,
        int(total.sum()),
        rank.breakdown.exposed_communication_ns,
        measure_total_ns(rank.late_gaps),
        rank.late_ns_by_cause("loading"),
        {rank.spans.names[code]: int(total[code]) for code in large.tolist()},
        int(rank.duration_ns.size),
        rank.is_training,
        rank.is_rocm,
        rank.framework,
    )


class JobContext(msgspec.Struct, frozen=True, eq=False, dict=True):
    """All ranks of a run."""

    rank_totals: tuple[RankTotals, ...]
    comparison_rows: tuple[Timeline, ...]
    """What `select_comparison_rows` leaves of each rank."""

    @cached_property
    def _matched(self) -> tuple[Timeline, MatchedCollectives]:
        found = align_ranks(*self.comparison_rows)
        return found.timeline, found.collectives

    @property
    def aligned_timeline(self) -> Timeline:
        """All ranks on one clock."""
        return self._matched[0]

    @property
    def collectives(self) -> MatchedCollectives:
        """Collectives matched across ranks, on one clock."""
        return self._matched[1]

    @cached_property
    def stragglers(self) -> Stragglers:
        """Who comes late."""
        return find_stragglers(self.aligned_timeline, self.collectives)

    @cached_property
    def expected_collectives(self) -> tuple[ExpectedCollective, ...]:
        """How fast collectives should have been; none where the device is not known."""
        cluster = find_catalog_cluster(self.comparison_rows[0]) if self.comparison_rows else None
        if cluster is None:
            return ()
        return predict_expected_collectives(
            sum_by_size(self.collectives), cluster, infer_node_placement(self.aligned_timeline)
        )

    def late_intervals(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Where a rank came last, longest first: from the last but one to itself, by its clock."""
        found = self.collectives
        members, calls = found.members, found.calls
        order = np.lexsort((members.start_ns, members.call_index))
        last = order[calls.first_member + calls.num_members - 1]
        lead = (
            members.start_ns[last]
            - members.start_ns[order[calls.first_member + calls.num_members - 2]]
        )
        own = np.flatnonzero(members.rank[last] == rank)
        own = own[np.argsort(-lead[own], kind="stable")][:MAX_LATE_INTERVALS]
        kept = next(part for part in self.comparison_rows if rank in part.ranks)
        start = kept.column("start_ns")[members.row[last[own]]]
        return tuple(zip((start - lead[own]).tolist(), start.tolist(), strict=True))

    def lost_ns_in(self, which: Flags) -> float:
        """What all ranks lose in these members, in ns; of waits at once, one counts."""
        members, lost = self.collectives.members, self.lost_ns
        total = 0
        for rank in np.unique(members.rank[which]).tolist():
            own = which & (members.rank == rank)
            total += measure_total_ns(
                union(members.start_ns[own], members.start_ns[own] + lost[own])
            )
        return float(total)

    @cached_property
    def lost_ns(self) -> Ints:
        """What each member of each collective loses to the last one: waits that nothing hides.

        At most by how much the last came after the last but one; where ranks are late together,
        after the last that is none of them.
        """
        found = self.collectives
        members, calls = found.members, found.calls
        late = self.stragglers.straggler_ranks
        order = np.lexsort((members.start_ns, members.call_index))
        last = calls.first_member + calls.num_members - 1
        lead = members.start_ns[order][last] - members.start_ns[order][last - 1]
        if len(late) > 1:
            never = np.iinfo(np.int64).min
            beside = np.where(np.isin(members.rank, late), never, members.start_ns)
            usual = np.maximum.reduceat(beside, calls.first_member)
            lead = np.where(usual > never, found.arrival_ns - usual, 0)
        wait = found.wait_ns
        for part in self.aligned_timeline.split_by_rank():
            own = members.rank == part.ranks[0]
            start = members.start_ns[own]
            spans = find_device_spans(part)
            wait[own] -= measure_covered_ns(spans.intervals_of(COMPUTE), start, start + wait[own])
        lost: Ints = np.minimum(wait, lead[members.call_index])
        return lost

    @cached_property
    def pipeline(self) -> PipelineAnalysis | None:
        """The pipeline, where there is one."""
        return analyze_pipeline(self.aligned_timeline)

    @cached_property
    def is_training(self) -> bool:
        """Whether any rank shows training."""
        return any(one.is_training for one in self.rank_totals)

    @cached_property
    def is_rocm(self) -> bool:
        """Whether the devices are AMD's."""
        return any(one.is_rocm for one in self.rank_totals)

    @cached_property
    def framework(self) -> str:
        """The trainer or serving engine that a rank shows; empty for none."""
        return next((one.framework for one in self.rank_totals if one.framework), "")

    @cached_property
    def window_ns(self) -> float:
        """Mean window of a rank."""
        windows = [one.window_ns for one in self.rank_totals]
        return sum(windows) / len(windows) if windows else 0.0
