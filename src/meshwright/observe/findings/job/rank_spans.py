"""Spans of one rank, selected by kind, category, name and enclosing span."""

import re
from functools import cached_property

import msgspec
import numpy as np

from meshwright.observe.analyze.device_time.kernel_classes import (
    classify_host_span,
    classify_kernel,
)
from meshwright.observe.analyze.spans.analysis_extent import (
    mask_counted_rows,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.call_stacks import (
    NO_SPAN,
    CallStackIndex,
    build_call_stacks,
    find_enclosing,
    find_innermost,
)
from meshwright.observe.analyze.spans.intervals import (
    COMPUTE,
    DeviceSpans,
    Flags,
    Intervals,
    Ints,
    match_values,
    union,
)
from meshwright.observe.analyze.spans.steps import (
    find_launch_rows,
    mask_host_rows,
)
from meshwright.timeline.schema import ABSENT, TimelineSource
from meshwright.timeline.timeline import Timeline

_TRAINING = re.compile(
    r"^Optimizer\.(step|zero_grad)#|^autograd::engine::|^torch::autograd::AccumulateGrad|"
    r"Backward\d+$|(?i:^(## )?(backward|optimizer[_ ]?step|train(ing)?[_ ]?step)\b)"
)
_GRADIENT = re.compile(r"(?i)backward|bwd|wgrad|fused_?adam")
"""Operators and annotations, and kernels, that only training has."""


class RankSpans(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The timeline of one rank with indexes over its host and device spans."""

    rank_timeline: Timeline

    @cached_property
    def rank(self) -> int:
        """Its number."""
        return self.rank_timeline.ranks[0] if self.rank_timeline.ranks else 0

    @cached_property
    def spans(self) -> DeviceSpans:
        """The device work that is counted."""
        return select_counted_spans(self.rank_timeline)

    @cached_property
    def duration_ns(self) -> Ints:
        """How long each device span took, ns."""
        return self.spans.end - self.spans.start

    @cached_property
    def window_ns(self) -> int:
        """From first start to last end of counted work."""
        low, high = self.spans.window_ns
        return high - low

    @cached_property
    def launch_row(self) -> Ints:
        """Row of the call that launched each device span; -1 unknown."""
        return find_launch_rows(self.rank_timeline, self.spans)

    @cached_property
    def start(self) -> Ints:
        """Start of every row."""
        return self.rank_timeline.column("start_ns")

    @cached_property
    def end(self) -> Ints:
        """End of every row."""
        end: Ints = self.start + self.rank_timeline.column("duration_ns")
        return end

    @cached_property
    def thread_id(self) -> Ints:
        """One number per process and lane, for every row."""
        lane, process = (
            self.rank_timeline.string_column("lane"),
            self.rank_timeline.string_column("process"),
        )
        thread: Ints = process.codes.astype(np.int64) * max(len(lane.values), 1) + lane.codes
        return thread

    @cached_property
    def is_host(self) -> Flags:
        """Which rows are the host's."""
        return mask_host_rows(self.rank_timeline)

    @cached_property
    def is_training(self) -> bool:
        """Whether anything shows training: an optimizer, a backward pass; simulated steps do."""
        kernels = (self.spans.names[code] for code in np.unique(self.spans.name).tolist())
        return (
            self.rank_timeline.source == TimelineSource.SIMULATED
            or any(map(_TRAINING.search, self.rank_timeline.string_column("name").values))
            or any(map(_GRADIENT.search, kernels))
        )

    @cached_property
    def _launches(self) -> Flags:
        """Which threads launch counted work; all where no launch is known."""
        known = self.launch_row[self.launch_row != ABSENT]
        threads = np.full(int(self.thread_id.max(initial=0)) + 1, not known.size)
        threads[self.thread_id[known]] = True
        return threads

    @cached_property
    def _sorts(self) -> tuple[Ints, list[str]]:
        names = self.rank_timeline.string_column("name")
        known: dict[str, int] = {"": 0}
        # A training that evaluates pauses as one that saves does; else evaluating is the work.
        also = {"evaluating": "saving" if self.is_training else ""}
        sorts = (classify_host_span(name) for name in names.values)
        codes = [known.setdefault(also.get(sort, sort), len(known)) for sort in sorts]
        found: Ints = np.array([*codes, 0])[names.codes] * self.is_host
        return found, list(known)

    def host_rows(self, sort: str) -> Ints:
        """Rows of the host of one sort of `names`, in the steps that are counted.

        Only of threads that launch: what others do holds up no launch. Python's garbage collector
        stops them all.
        """
        codes, words = self._sorts
        if sort not in words:
            return np.zeros(0, dtype=np.int64)
        rows = np.flatnonzero(codes == words.index(sort))
        if sort != "collecting":
            rows = rows[self._launches[self.thread_id[rows]]]
        return mask_counted_rows(self.rank_timeline, rows)

    def host_intervals(self, sort: str) -> Intervals:
        """When the host was in spans of one sort."""
        rows = self.host_rows(sort)
        return union(self.start[rows], self.end[rows])

    def match_categories(self, *values: str) -> Ints:
        """Rows of the host that the profiler filed under one of these."""
        filed = match_values(
            self.rank_timeline.string_column("category"), lambda value: value in values
        )
        return np.flatnonzero(filed & self.is_host)

    def match_rows_within(self, rows: Ints, outer: Ints) -> Flags:
        """Which rows start inside one of the outer rows, on the same thread."""
        tree = build_call_stacks(self.thread_id[outer], self.start[outer], self.end[outer])
        inside: Flags = find_innermost(tree, self.thread_id[rows], self.start[rows]) != NO_SPAN
        return inside

    def match_launched_in(self, sort: str, which: Flags | None = None) -> Flags:
        """Which device spans were launched inside host spans of one sort."""
        inside: Flags = self.find_enclosing_launch_span(sort, which) != NO_SPAN
        return inside

    def find_enclosing_launch_span(self, sort: str, which: Flags | None = None) -> Ints:
        """The place among the host's spans of one sort that each device span was launched in.

        -1 for none, for spans whose launch is not known, and for those not asked for.
        """
        known = self.launch_row != ABSENT if which is None else which & (self.launch_row != ABSENT)
        found = np.full(self.launch_row.size, NO_SPAN, dtype=np.int64)
        rows, outer = self.launch_row[known], self.host_rows(sort)
        if outer.size and rows.size:
            tree = build_call_stacks(self.thread_id[outer], self.start[outer], self.end[outer])
            found[known] = find_innermost(tree, self.thread_id[rows], self.start[rows])
        return found

    @cached_property
    def _operators(self) -> tuple[Ints, CallStackIndex]:
        rows = self.match_categories("cpu_op", "Operator", "user_annotation")
        return rows, build_call_stacks(self.thread_id[rows], self.start[rows], self.end[rows])

    def find_operators_around(self, rows: Ints) -> list[Ints]:
        """Name codes of the operators around each row, outermost first; -1 for none."""
        outer, tree = self._operators
        codes = np.append(self.rank_timeline.string_column("name").codes[outer], ABSENT)
        return [
            codes[level] for level in find_enclosing(tree, self.thread_id[rows], self.start[rows])
        ]

    def match_kernels(self, *sorts: str) -> Flags:
        """Which device spans are kernels of one of these sorts of `names`."""
        found: Flags = self._sorted_kernels[0][self.spans.name] & self._mask(sorts) != 0
        return found

    @cached_property
    def _sorted_kernels(self) -> tuple[Ints, dict[str, int]]:
        bits: dict[str, int] = {}
        table = np.zeros(len(self.spans.names) + 1, dtype=np.int64)
        computing = self.spans.name[self.spans.kind == COMPUTE]
        for code in np.unique(computing).tolist():
            for sort in classify_kernel(self.spans.names[code]):
                table[code] |= 1 << bits.setdefault(sort, len(bits))
        return table, bits

    def _mask(self, sorts: tuple[str, ...]) -> int:
        bits = self._sorted_kernels[1]
        return sum(1 << bits[sort] for sort in sorts if sort in bits)

    def match_names(self, test: str) -> Flags:
        """Which device spans have this in their names."""
        hit = np.zeros(len(self.spans.names) + 1, dtype=np.bool_)
        for code in np.unique(self.spans.name).tolist():
            hit[code] = test in self.spans.names[code]
        return hit[self.spans.name]

    def find_busy_intervals(self, which: Flags) -> Intervals:
        """When any of these device spans ran; where several did at once, the moment counts once."""
        return union(self.spans.start[which], self.spans.end[which])
