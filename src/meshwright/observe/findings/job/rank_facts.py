"""Facts of one rank's timeline, each computed once, when a detector first reads it."""

from functools import cached_property

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.analyze.device_time.breakdown import (
    RankBreakdown,
    analyze_rank_breakdown,
    collective_of,
)
from meshwright.observe.analyze.device_time.idle_time import RankIdle, analyze_rank_idle
from meshwright.observe.analyze.device_time.launches import RankLaunches, analyze_rank_launches
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    count_complete_steps,
)
from meshwright.observe.analyze.spans.intervals import (
    COMMUNICATION,
    COMPUTE,
    MEMORY_COPY,
    Flags,
    Intervals,
    Ints,
    measure_total_ns,
    subtract,
    union,
)
from meshwright.observe.analyze.spans.steps import (
    RankSteps,
    find_rank_steps,
)
from meshwright.observe.findings.frameworks import detect_framework
from meshwright.observe.findings.job.rank_spans import RankSpans
from meshwright.timeline.columns import chunks_to_numpy
from meshwright.timeline.readers.parsing.arrow_arrays import integers_to_numpy, take_rows
from meshwright.timeline.schema import ABSENT, TimelineSource

_COMMUNICATING = ("nccl:", "c10d::", "rccl:", "gloo:")
"""Prefixes of operators that communicate."""


class RankFacts(RankSpans, frozen=True, eq=False, dict=True):
    """What the timeline of one rank shows."""

    @cached_property
    def breakdown(self) -> RankBreakdown:
        """Where the device's time goes."""
        return analyze_rank_breakdown(self.rank_timeline, AnalysisExtent.COMPLETE_STEPS)

    @cached_property
    def idle(self) -> RankIdle:
        """Why the device is idle."""
        return analyze_rank_idle(self.rank_timeline)

    @cached_property
    def launches(self) -> RankLaunches:
        """How the host feeds the device."""
        return analyze_rank_launches(self.rank_timeline)

    @cached_property
    def steps(self) -> RankSteps:
        """Its steps."""
        return find_rank_steps(self.rank_timeline)

    @cached_property
    def num_steps(self) -> float | None:
        """How many steps the counted work is of; None where steps are not known."""
        number = count_complete_steps(self.rank_timeline)
        if (
            not number
            and self.rank_timeline.source == TimelineSource.SIMULATED
            and "step_s" in self.rank_timeline.metadata
        ):
            number = 1
        return float(number) if number else None

    @cached_property
    def is_rocm(self) -> bool:
        """Whether the device is AMD's: its runtime's calls or its name say so."""
        devices = self.rank_timeline.metadata.get("devices", "").lower()
        if devices:
            return '"amd' in devices or "instinct" in devices or "radeon" in devices
        return any(
            name.startswith("hip") for name in self.rank_timeline.string_column("name").values
        )

    @cached_property
    def framework(self) -> str:
        """The trainer or serving engine that it shows; empty for none."""
        return detect_framework(
            self.rank_timeline.string_column("name").values, trains=self.is_training
        )

    @cached_property
    def main_stream(self) -> int:
        """The stream that computes most; -1 where none does."""
        compute = self.spans.kind == COMPUTE
        if not compute.any():
            return ABSENT
        return int(np.bincount(self.spans.lane[compute], self.duration_ns[compute]).argmax())

    @cached_property
    def compute_intervals(self) -> Intervals:
        """When anything computes."""
        return self.spans.intervals_of(COMPUTE)

    def find_exposed_intervals(self, which: Flags) -> Intervals:
        """When any of these ran and nothing hid it: no compute, and no communication beside copies.

        They are spans of communication, or copies.
        """
        copies = bool((self.spans.kind[which] == MEMORY_COPY).any())
        hiding = (
            self.spans.intervals_of(COMPUTE, COMMUNICATION) if copies else self.compute_intervals
        )
        return subtract(self.find_busy_intervals(which), hiding)

    def measure_uncontended_ns(self, which: Flags) -> int:
        """How long these compute kernels ran with no other beside them: what the rest waits for."""
        length = int(self.duration_ns[which].sum())
        if not self._at_once:
            return length
        others = (self.spans.kind == COMPUTE) & ~which
        return measure_total_ns(
            subtract(self.find_busy_intervals(which), self.find_busy_intervals(others))
        )

    @cached_property
    def _at_once(self) -> bool:
        """Whether compute kernels ever run beside each other."""
        return int(self.duration_ns[self.spans.kind == COMPUTE].sum()) > measure_total_ns(
            self.compute_intervals
        )

    @cached_property
    def communication_spans(self) -> tuple[Ints, tuple[str, ...]]:
        """Place and kind of each communication span: as the trace, its operator or its name says.

        NCCL runs several collectives by kernels called SendRecv; the operator tells them apart.
        """
        own = np.flatnonzero(self.spans.kind == COMMUNICATION)
        said, names = (
            self.rank_timeline.string_column("collective"),
            self.rank_timeline.string_column("name"),
        )
        launch = self.launch_row[own]
        around = self.find_operators_around(np.maximum(launch, 0)) if own.size else []
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
    def exposed_ns_by_kind(self) -> dict[str, int]:
        """How long communication of each kind is exposed; a moment is the first kind's in it."""
        own, kinds = self.communication_spans
        words = np.array(kinds)
        left = subtract(union(self.spans.start[own], self.spans.end[own]), self.compute_intervals)
        found = {}
        for kind in sorted(set(kinds)):
            mine = own[words == kind]
            rest = subtract(left, union(self.spans.start[mine], self.spans.end[mine]))
            found[kind] = measure_total_ns(left) - measure_total_ns(rest)
            left = rest
        return found

    def group_similar_launches(self, place: Ints) -> Ints:
        """A number per device span that kernels of one name, grid and block share; -1 for others.

        Only the places asked for have one, and only where the trace says the grid.
        """
        found = np.full(self.spans.row.size, ABSENT, dtype=np.int64)
        if (
            "extra" not in self.rank_timeline.known_columns
            or "extra" not in self.rank_timeline.spans.column_names
        ):
            return found
        texts = take_rows(self.rank_timeline.spans.column("extra"), self.spans.row[place])
        grid = pc.struct_field(pc.extract_regex(texts, r'"grid":\s*(?P<grid>\[[^\]]*\])'), "grid")
        codes = integers_to_numpy(pc.dictionary_encode(grid).indices)
        both = np.stack([self.spans.name[place], codes], axis=1)
        _, number = np.unique(both, axis=0, return_inverse=True)
        found[place] = np.where(both[:, 1] >= 0, number.reshape(-1), ABSENT)
        return found

    def read_argument(self, rows: Ints, name: str) -> Ints:
        """A number among the arguments of rows; NaN where it is not said."""
        if (
            "extra" not in self.rank_timeline.known_columns
            or "extra" not in self.rank_timeline.spans.column_names
        ):
            return np.full(rows.size, np.nan)
        texts = take_rows(self.rank_timeline.spans.column("extra"), rows)
        found = pc.extract_regex(texts, rf'"{name}":\s*(?P<number>[0-9.]+)')
        number = pc.cast(pc.struct_field(found, "number"), pa.float64(), safe=False)
        values = chunks_to_numpy([number], "float64")
        return np.where(values < 0, np.nan, values)

    def find_compute_capability(self) -> int | None:
        """Major compute capability of the first device; None where the trace does not say."""
        return self._device_property("computeMajor")

    def find_device_bytes(self) -> int | None:
        """Memory of the first device; None where the trace does not say."""
        return self._device_property("totalGlobalMem")

    def _device_property(self, name: str) -> int | None:
        try:
            devices = msgspec.json.decode(self.rank_timeline.metadata.get("devices") or "[]")
        except msgspec.MsgspecError:
            return None
        first = devices[0] if isinstance(devices, list) and devices else {}
        said = first.get(name) if isinstance(first, dict) else None
        return said if isinstance(said, int) else None
