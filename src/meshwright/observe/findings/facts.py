"""Plain facts of one rank's timeline, worked out once and only when asked."""

import re
from functools import cached_property

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.analyze.breakdown import RankBreakdown, breakdown_of, collective_of
from meshwright.observe.analyze.idle import RankIdle, idle_of
from meshwright.observe.analyze.launches import RankLaunches, launches_of
from meshwright.observe.analyze.nest import NONE, Nest, enclosing, innermost, nest
from meshwright.observe.analyze.spans import (
    COMMUNICATION,
    COMPUTE,
    MEMORY_COPY,
    DeviceSpans,
    Flags,
    Intervals,
    Ints,
    measure,
    subtract,
    union,
    where,
)
from meshwright.observe.analyze.steps import (
    Extent,
    RankSteps,
    counted,
    counted_steps,
    in_counted_steps,
    launch_rows,
    on_host,
    steps_of,
)
from meshwright.observe.findings.frameworks import framework_of
from meshwright.observe.findings.names import host_sort, kernel_sorts
from meshwright.timeline.columns import as_numpy
from meshwright.timeline.readers.arrow_arrays import taken, whole_numbers
from meshwright.timeline.schema import ABSENT, Source
from meshwright.timeline.timeline import Timeline

_COMMUNICATING = ("nccl:", "c10d::", "rccl:", "gloo:")
_TRAINING = re.compile(
    r"^Optimizer\.(step|zero_grad)#|^autograd::engine::|^torch::autograd::AccumulateGrad|"
    r"Backward\d+$|(?i:^(## )?(backward|optimizer[_ ]?step|train(ing)?[_ ]?step)\b)"
)
_GRADIENT = re.compile(r"(?i)backward|bwd|wgrad|fused_?adam")
"""Operators and annotations, and kernels, that only training has."""


class Facts(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One rank's timeline and what it says."""

    part: Timeline

    @cached_property
    def rank(self) -> int:
        """Its number."""
        return self.part.ranks[0] if self.part.ranks else 0

    @cached_property
    def spans(self) -> DeviceSpans:
        """The device work that is counted."""
        return counted(self.part)

    @cached_property
    def length(self) -> Ints:
        """How long each device span took, ns."""
        return self.spans.end - self.spans.start

    @cached_property
    def window_ns(self) -> int:
        """From first start to last end of counted work."""
        low, high = self.spans.window_ns
        return high - low

    @cached_property
    def launch(self) -> Ints:
        """Row of the call that launched each device span; -1 unknown."""
        return launch_rows(self.part, self.spans)

    @cached_property
    def breakdown(self) -> RankBreakdown:
        """Where the device's time goes."""
        return breakdown_of(self.part, Extent.SETTLED)

    @cached_property
    def idle(self) -> RankIdle:
        """Why the device is idle."""
        return idle_of(self.part)

    @cached_property
    def launches(self) -> RankLaunches:
        """How the host feeds the device."""
        return launches_of(self.part)

    @cached_property
    def steps(self) -> RankSteps:
        """Its steps."""
        return steps_of(self.part)

    @cached_property
    def num_steps(self) -> float | None:
        """How many steps the counted work is of; None where steps are not known."""
        number = counted_steps(self.part)
        if not number and self.part.source == Source.SIMULATED and "step_s" in self.part.metadata:
            number = 1
        return float(number) if number else None

    @cached_property
    def start(self) -> Ints:
        """Start of every row."""
        return self.part.column("start_ns")

    @cached_property
    def end(self) -> Ints:
        """End of every row."""
        end: Ints = self.start + self.part.column("duration_ns")
        return end

    @cached_property
    def thread(self) -> Ints:
        """One number per process and lane, for every row."""
        lane, process = self.part.strings("lane"), self.part.strings("process")
        thread: Ints = process.codes.astype(np.int64) * max(len(lane.values), 1) + lane.codes
        return thread

    @cached_property
    def host(self) -> Flags:
        """Which rows are the host's."""
        return on_host(self.part)

    @cached_property
    def trains(self) -> bool:
        """Whether anything shows training: an optimizer, a backward pass; simulated steps do."""
        kernels = (self.spans.names[code] for code in np.unique(self.spans.name).tolist())
        return (
            self.part.source == Source.SIMULATED
            or any(map(_TRAINING.search, self.part.strings("name").values))
            or any(map(_GRADIENT.search, kernels))
        )

    @cached_property
    def on_rocm(self) -> bool:
        """Whether the device is AMD's: its runtime's calls or its name say so."""
        devices = self.part.metadata.get("devices", "").lower()
        if devices:
            return '"amd' in devices or "instinct" in devices or "radeon" in devices
        return any(name.startswith("hip") for name in self.part.strings("name").values)

    @cached_property
    def framework(self) -> str:
        """The trainer or serving engine that it shows; empty for none."""
        return framework_of(self.part.strings("name").values, trains=self.trains)

    @cached_property
    def _launches(self) -> Flags:
        """Which threads launch counted work; all where no launch is known."""
        known = self.launch[self.launch != ABSENT]
        threads = np.full(int(self.thread.max(initial=0)) + 1, not known.size)
        threads[self.thread[known]] = True
        return threads

    @cached_property
    def _sorts(self) -> tuple[Ints, list[str]]:
        names = self.part.strings("name")
        known: dict[str, int] = {"": 0}
        # A training that evaluates pauses as one that saves does; else evaluating is the work.
        also = {"evaluating": "saving" if self.trains else ""}
        sorts = (host_sort(name) for name in names.values)
        codes = [known.setdefault(also.get(sort, sort), len(known)) for sort in sorts]
        found: Ints = np.array([*codes, 0])[names.codes] * self.host
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
            rows = rows[self._launches[self.thread[rows]]]
        return in_counted_steps(self.part, rows)

    def host_time(self, sort: str) -> Intervals:
        """When the host was in spans of one sort."""
        rows = self.host_rows(sort)
        return union(self.start[rows], self.end[rows])

    def category(self, *values: str) -> Ints:
        """Rows of the host that the profiler filed under one of these."""
        filed = where(self.part.strings("category"), lambda value: value in values)
        return np.flatnonzero(filed & self.host)

    def within(self, rows: Ints, outer: Ints) -> Flags:
        """Which rows start inside one of the outer rows, on the same thread."""
        tree = nest(self.thread[outer], self.start[outer], self.end[outer])
        inside: Flags = innermost(tree, self.thread[rows], self.start[rows]) != NONE
        return inside

    def launched_in(self, sort: str, which: Flags | None = None) -> Flags:
        """Which device spans were launched inside host spans of one sort."""
        inside: Flags = self.launching(sort, which) != NONE
        return inside

    def launching(self, sort: str, which: Flags | None = None) -> Ints:
        """The place among the host's spans of one sort that each device span was launched in.

        -1 for none, for spans whose launch is not known, and for those not asked for.
        """
        known = self.launch != ABSENT if which is None else which & (self.launch != ABSENT)
        found = np.full(self.launch.size, NONE, dtype=np.int64)
        rows, outer = self.launch[known], self.host_rows(sort)
        if outer.size and rows.size:
            tree = nest(self.thread[outer], self.start[outer], self.end[outer])
            found[known] = innermost(tree, self.thread[rows], self.start[rows])
        return found

    @cached_property
    def _operators(self) -> tuple[Ints, Nest]:
        rows = self.category("cpu_op", "Operator", "user_annotation")
        return rows, nest(self.thread[rows], self.start[rows], self.end[rows])

    def operators_around(self, rows: Ints) -> list[Ints]:
        """Name codes of the operators around each row, outermost first; -1 for none."""
        outer, tree = self._operators
        codes = np.append(self.part.strings("name").codes[outer], ABSENT)
        return [codes[level] for level in enclosing(tree, self.thread[rows], self.start[rows])]

    def kernels(self, *sorts: str) -> Flags:
        """Which device spans are kernels of one of these sorts of `names`."""
        found: Flags = self._sorted_kernels[0][self.spans.name] & self._mask(sorts) != 0
        return found

    @cached_property
    def _sorted_kernels(self) -> tuple[Ints, dict[str, int]]:
        bits: dict[str, int] = {}
        table = np.zeros(len(self.spans.names) + 1, dtype=np.int64)
        computing = self.spans.name[self.spans.kind == COMPUTE]
        for code in np.unique(computing).tolist():
            for sort in kernel_sorts(self.spans.names[code]):
                table[code] |= 1 << bits.setdefault(sort, len(bits))
        return table, bits

    def _mask(self, sorts: tuple[str, ...]) -> int:
        bits = self._sorted_kernels[1]
        return sum(1 << bits[sort] for sort in sorts if sort in bits)

    def named(self, test: str) -> Flags:
        """Which device spans have this in their names."""
        hit = np.zeros(len(self.spans.names) + 1, dtype=np.bool_)
        for code in np.unique(self.spans.name).tolist():
            hit[code] = test in self.spans.names[code]
        return hit[self.spans.name]

    @cached_property
    def main_lane(self) -> int:
        """The stream that computes most; -1 where none does."""
        compute = self.spans.kind == COMPUTE
        if not compute.any():
            return ABSENT
        return int(np.bincount(self.spans.lane[compute], self.length[compute]).argmax())

    @cached_property
    def compute(self) -> Intervals:
        """When anything computes."""
        return self.spans.of(COMPUTE)

    def when(self, which: Flags) -> Intervals:
        """When any of these device spans ran; where several did at once, the moment counts once."""
        return union(self.spans.start[which], self.spans.end[which])

    def exposed(self, which: Flags) -> Intervals:
        """When any of these ran and nothing hid it: no compute, and no communication beside copies.

        They are spans of communication, or copies.
        """
        copies = bool((self.spans.kind[which] == MEMORY_COPY).any())
        hiding = self.spans.of(COMPUTE, COMMUNICATION) if copies else self.compute
        return subtract(self.when(which), hiding)

    def alone_ns(self, which: Flags) -> int:
        """How long these compute kernels ran with no other beside them: what the rest waits for."""
        length = int(self.length[which].sum())
        if not self._at_once:
            return length
        others = (self.spans.kind == COMPUTE) & ~which
        return measure(subtract(self.when(which), self.when(others)))

    @cached_property
    def _at_once(self) -> bool:
        """Whether compute kernels ever run beside each other."""
        return int(self.length[self.spans.kind == COMPUTE].sum()) > measure(self.compute)

    @cached_property
    def collectives(self) -> tuple[Ints, tuple[str, ...]]:
        """Place and kind of each communication span: as the trace, its operator or its name says.

        NCCL runs several collectives by kernels called SendRecv; the operator tells them apart.
        """
        own = np.flatnonzero(self.spans.kind == COMMUNICATION)
        said, names = self.part.strings("collective"), self.part.strings("name")
        launch = self.launch[own]
        around = self.operators_around(np.maximum(launch, 0)) if own.size else []
        words = [said.values[code] if code >= 0 else "" for code in said.codes[self.spans.row[own]]]
        for level in reversed(around):
            for at, code in enumerate(level.tolist()):
                name = names.values[code] if code >= 0 and launch[at] != ABSENT else ""
                if words[at] in ("", "send_recv") and name.startswith(_COMMUNICATING):
                    words[at] = name
        return own, tuple(
            collective_of(word or self.spans.names[self.spans.name[at]])
            for word, at in zip(words, own.tolist(), strict=True)
        )

    @cached_property
    def exposed_by_kind(self) -> dict[str, int]:
        """How long communication of each kind is exposed; a moment is the first kind's in it."""
        own, kinds = self.collectives
        words = np.array(kinds)
        left = subtract(union(self.spans.start[own], self.spans.end[own]), self.compute)
        found = {}
        for kind in sorted(set(kinds)):
            mine = own[words == kind]
            rest = subtract(left, union(self.spans.start[mine], self.spans.end[mine]))
            found[kind] = measure(left) - measure(rest)
            left = rest
        return found

    def like_launches(self, place: Ints) -> Ints:
        """A number per device span that kernels of one name, grid and block share; -1 for others.

        Only the places asked for have one, and only where the trace says the grid.
        """
        found = np.full(self.spans.row.size, ABSENT, dtype=np.int64)
        if "extra" not in self.part.known or "extra" not in self.part.spans.column_names:
            return found
        texts = taken(self.part.spans.column("extra"), self.spans.row[place])
        grid = pc.struct_field(pc.extract_regex(texts, r'"grid":\s*(?P<grid>\[[^\]]*\])'), "grid")
        codes = whole_numbers(pc.dictionary_encode(grid).indices)
        both = np.stack([self.spans.name[place], codes], axis=1)
        _, number = np.unique(both, axis=0, return_inverse=True)
        found[place] = np.where(both[:, 1] >= 0, number.reshape(-1), ABSENT)
        return found

    def argument(self, rows: Ints, name: str) -> Ints:
        """A number among the arguments of rows; NaN where it is not said."""
        if "extra" not in self.part.known or "extra" not in self.part.spans.column_names:
            return np.full(rows.size, np.nan)
        texts = taken(self.part.spans.column("extra"), rows)
        found = pc.extract_regex(texts, rf'"{name}":\s*(?P<number>[0-9.]+)')
        number = pc.cast(pc.struct_field(found, "number"), pa.float64(), safe=False)
        values = as_numpy([number], "float64")
        return np.where(values < 0, np.nan, values)
