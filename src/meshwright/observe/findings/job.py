"""What detectors ask of all ranks together, worked out once and only when asked.

Of each rank only what they need is kept: device work, marks of steps and passes, waits for data.
"""

import re
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.analyze.clocks import on_one_clock
from meshwright.observe.analyze.collective_expected import (
    Expected,
    cluster_of,
    expected,
    nodes_of,
)
from meshwright.observe.analyze.collectives import Collectives, by_size
from meshwright.observe.analyze.pipeline import Pipeline, pipeline
from meshwright.observe.analyze.spans import (
    COMPUTE,
    DEVICE_KINDS,
    Flags,
    Ints,
    covered,
    device_spans,
    measure,
    union,
    where,
)
from meshwright.observe.analyze.stragglers import Stragglers, stragglers
from meshwright.observe.findings.rank import Rank
from meshwright.policy.pipeline.spans import LANE
from meshwright.timeline.readers.arrow_arrays import flags
from meshwright.timeline.schema import Kind
from meshwright.timeline.timeline import Timeline, has_kind

_MARKS = re.compile(
    r"^ProfilerStep|^Optimizer\.step#|(?i:data_?loader|enumerate\(|__next__|next_data|load_batch)"
)


MOST_PLACES = 5


class Summary(NamedTuple):
    """One rank in short."""

    rank: int
    window_ns: int
    num_steps: float | None
    compute_ns: int
    exposed_communication_ns: int
    late_ns: int
    """Idle because the host launched late."""
    loading_ns: int
    """The part of that in which the host waited for data."""
    kernel_ns: dict[str, int]
    """Time of each compute kernel that has a hundredth of compute time or more."""
    num_spans: int
    """Device spans that are counted."""
    trains: bool
    on_rocm: bool
    framework: str
    """The trainer or serving engine that it shows; empty for none."""


def summary_of(rank: Rank) -> Summary:
    """Sum up one rank."""
    computing = rank.spans.kind == COMPUTE
    names, length = rank.spans.name[computing], rank.length[computing]
    total = np.bincount(names, length, minlength=1)
    large = np.flatnonzero(total >= max(1.0, total.sum() / 100))
    return Summary(
        rank.rank,
        rank.window_ns,
        rank.num_steps,
        int(total.sum()),
        rank.breakdown.exposed_communication_ns,
        measure(rank.late_gaps),
        rank.claimed_ns("loading"),
        {rank.spans.names[code]: int(total[code]) for code in large.tolist()},
        int(rank.length.size),
        rank.trains,
        rank.on_rocm,
        rank.framework,
    )


def kept_of(part: Timeline) -> Timeline:
    """The rows of one rank that comparing ranks takes; arguments of collectives only."""
    names, lanes = part.strings("name"), part.strings("lane")
    kinds = part.strings("kind")
    keep = has_kind(kinds, DEVICE_KINDS)
    keep = keep | where(names, _MARKS.search) | where(lanes, lambda lane: lane.startswith(LANE))
    spans = part.spans.filter(flags(keep))
    if "extra" in spans.column_names:
        at = spans.column_names.index("extra")
        talks = flags(has_kind(kinds, [Kind.COMMUNICATION])[keep])
        texts = spans.column("extra")
        texts = pc.if_else(talks, texts, pa.scalar(None, texts.type))
        spans = spans.set_column(at, spans.schema.field(at), texts)
    return msgspec.structs.replace(part, spans=spans, counters=part.counters.slice(0, 0))


class Job(msgspec.Struct, frozen=True, eq=False, dict=True):
    """All ranks of a run."""

    summaries: tuple[Summary, ...]
    kept: tuple[Timeline, ...]
    """What `kept_of` leaves of each rank."""

    @cached_property
    def _matched(self) -> tuple[Timeline, Collectives]:
        found = on_one_clock(*self.kept)
        return found.whole, found.collectives

    @property
    def whole(self) -> Timeline:
        """All ranks on one clock."""
        return self._matched[0]

    @property
    def collectives(self) -> Collectives:
        """Collectives matched across ranks, on one clock."""
        return self._matched[1]

    @cached_property
    def stragglers(self) -> Stragglers:
        """Who comes late."""
        return stragglers(self.whole, self.collectives)

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """How fast collectives should have been; none where the device is not known."""
        cluster = cluster_of(self.kept[0]) if self.kept else None
        if cluster is None:
            return ()
        return expected(by_size(self.collectives), cluster, nodes_of(self.whole))

    def late_places(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Where a rank came last, longest first: from the last but one to itself, by its clock."""
        found = self.collectives
        members, calls = found.members, found.calls
        order = np.lexsort((members.start_ns, members.call))
        last = order[calls.first + calls.members - 1]
        lead = members.start_ns[last] - members.start_ns[order[calls.first + calls.members - 2]]
        own = np.flatnonzero(members.rank[last] == rank)
        own = own[np.argsort(-lead[own], kind="stable")][:MOST_PLACES]
        kept = next(part for part in self.kept if rank in part.ranks)
        start = kept.column("start_ns")[members.row[last[own]]]
        return tuple(zip((start - lead[own]).tolist(), start.tolist(), strict=True))

    def lost_to(self, which: Flags) -> float:
        """What all ranks lose in these members, in ns; of waits at once, one counts."""
        members, lost = self.collectives.members, self.lost_ns
        total = 0
        for rank in np.unique(members.rank[which]).tolist():
            own = which & (members.rank == rank)
            total += measure(union(members.start_ns[own], members.start_ns[own] + lost[own]))
        return float(total)

    @cached_property
    def lost_ns(self) -> Ints:
        """What each member of each collective loses to the last one: waits that nothing hides.

        At most by how much the last came after the last but one; where ranks are late together,
        after the last that is none of them.
        """
        found = self.collectives
        members, calls = found.members, found.calls
        late = self.stragglers.late
        order = np.lexsort((members.start_ns, members.call))
        last = calls.first + calls.members - 1
        lead = members.start_ns[order][last] - members.start_ns[order][last - 1]
        if len(late) > 1:
            never = np.iinfo(np.int64).min
            beside = np.where(np.isin(members.rank, late), never, members.start_ns)
            usual = np.maximum.reduceat(beside, calls.first)
            lead = np.where(usual > never, found.arrival_ns - usual, 0)
        wait = found.wait_ns
        for part in self.whole.by_rank():
            own = members.rank == part.ranks[0]
            start = members.start_ns[own]
            spans = device_spans(part)
            wait[own] -= covered(spans.of(COMPUTE), start, start + wait[own])
        lost: Ints = np.minimum(wait, lead[members.call])
        return lost

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, where there is one."""
        return pipeline(self.whole)

    @cached_property
    def trains(self) -> bool:
        """Whether any rank shows training."""
        return any(one.trains for one in self.summaries)

    @cached_property
    def on_rocm(self) -> bool:
        """Whether the devices are AMD's."""
        return any(one.on_rocm for one in self.summaries)

    @cached_property
    def framework(self) -> str:
        """The trainer or serving engine that a rank shows; empty for none."""
        return next((one.framework for one in self.summaries if one.framework), "")

    @cached_property
    def window_ns(self) -> float:
        """Mean window of a rank."""
        windows = [one.window_ns for one in self.summaries]
        return sum(windows) / len(windows) if windows else 0.0
