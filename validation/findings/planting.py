"""Plants faults of known cost in a rank's timeline, simulated or real.

stall     the host does something else before it launches a kernel; the device waits
insert    work that was not there, launched in time
hold      the device waits though the kernel was launched

All that comes later moves, on every stream. So faults are planted only where nothing else runs on
the device: beside a running collective a real fault would partly be hidden, and moving one stream
past another would make gaps that no fault makes.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.spans.analysis_extent import select_counted_spans
from meshwright.observe.analyze.spans.intervals import DeviceSpans
from meshwright.observe.analyze.spans.steps import find_launch_rows
from meshwright.timeline.timeline import Timeline
from validation.findings.clean_jobs import DEFAULTS

_AHEAD_NS, _BUSY_NS = 50_000, 5_000
_FIRST_FLOW = 1 << 40
_STRINGS = ("process", "lane", "kind", "name", "collective", "group", "dtype", "category", "extra")
_NUMBERS = ("start_ns", "duration_ns", "flow_out", "flow_in", "bytes")


class Work(NamedTuple):
    """A device span to insert."""

    name: str
    length_ns: int
    kind: str = "compute"
    gap_ns: int = 0
    """Device idle before it."""
    more: dict[str, Any] = {}  # noqa: RUF012


class Planter:
    """A timeline of one rank that can be changed."""

    def __init__(self, part: Timeline, seed: int = 0) -> None:
        self.part, self.rank = part, part.ranks[0]
        self.random = np.random.default_rng(seed)
        self.columns: dict[str, list[Any]] = {}
        for name in _STRINGS:
            coded = part.string_column(name)
            words = [*coded.values, None]
            self.columns[name] = [words[code] for code in coded.codes.tolist()]
        self.start = part.column("start_ns").copy()
        self.length = part.column("duration_ns").copy()
        self.flow_out = part.column("flow_out").copy()
        self.others = {name: part.column(name).tolist() for name in ("flow_in", "bytes")}
        self.opening: dict[int, int] = {}
        self.added: list[dict[str, Any]] = []
        spans = select_counted_spans(part)
        self.window_ns = spans.window_ns[1] - spans.window_ns[0]
        launch = find_launch_rows(part, spans)
        lanes = np.bincount(spans.lane[spans.kind == 0], (spans.end - spans.start)[spans.kind == 0])
        plain = (launch >= 0) & (spans.kind == 0) & (spans.lane == int(lanes.argmax()))
        plain &= self._clear(launch) & _quiet(spans)
        self.kernels = spans.row[plain]
        self.launches = launch[plain]
        self.lane = spans.lanes[int(lanes.argmax())]
        before = np.append(0, np.maximum.accumulate(spans.end)[:-1])
        lead = spans.start - np.where(launch >= 0, self.start[launch], spans.start)
        self.ahead = ((lead >= _AHEAD_NS) & (spans.start - before < _BUSY_NS))[plain]
        """Kernels that were launched in time, with the device busy until they start."""
        self.on_device = np.array(
            [name.startswith("gpu") for name in self.columns["process"]], dtype=np.bool_
        )
        self.flow = _FIRST_FLOW
        self.moved: list[tuple[bool, int, int]] = []

    def _clear(self, launch: Any) -> Any:
        """Which device spans a stall before them delays with all that follows.

        Their launch comes before those of all later ones and after those of all earlier ones, and
        is the first in its operator: the host can stop before the operator. The optimizer's own
        are left out: patterns differ there.
        """
        begun = np.where(launch >= 0, self.start[launch], np.iinfo(np.int64).max)
        clear = begun <= np.minimum.accumulate(begun[::-1])[::-1]
        known = np.where(launch >= 0, begun, 0)
        clear &= begun >= np.maximum.accumulate(known)
        for row, name in enumerate(self.columns["name"]):
            if name.startswith("Optimizer.step#"):
                clear &= (begun < self.start[row]) | (begun > self.start[row] + self.length[row])
        lane, end = self.part.string_column("lane").codes, self.start + self.length
        outer = np.array(
            [
                row
                for row, filed in enumerate(self.columns["category"])
                if filed in ("cpu_op", "Operator") and self.length[row] > 0
            ],
            dtype=np.int64,
        )
        for thread in np.unique(lane[launch[launch >= 0]]).tolist():
            own = outer[lane[outer] == thread]
            if not own.size:
                continue
            own = own[np.lexsort((-end[own], self.start[own]))]
            reach = np.maximum.accumulate(end[own])
            top = own[np.append(True, self.start[own][1:] >= reach[:-1])]
            mine = np.flatnonzero((launch >= 0) & (lane[launch] == thread))
            at = np.searchsorted(self.start[top], self.start[launch[mine]], side="right") - 1
            inside = (at >= 0) & (end[top[np.maximum(at, 0)]] > self.start[launch[mine]])
            seen: set[int] = set()
            for place, operator in zip(mine[inside].tolist(), at[inside].tolist(), strict=True):
                clear[place] &= operator not in seen
                seen.add(operator)
                self.opening[int(launch[place])] = int(top[operator])
        return clear

    def places(
        self, number: int, *, first: float = 0.05, last: float = 0.95, ahead: bool = False
    ) -> list[int]:
        """Kernels spread over the time of the window, in order.

        `ahead`: only those before which the host may wait for the device; a host that is late
        already does not wait.
        """
        chosen = np.flatnonzero(self.ahead) if ahead else np.arange(self.kernels.size)
        begun = self.start[self.kernels[chosen]]
        whole = begun[-1] - begun[0]
        within = begun <= begun[0] + last * whole
        chosen, begun = chosen[within], begun[within]
        spread = begun[0] + np.linspace(first, last, number) * whole
        spread += self.random.uniform(-0.4, 0.4, number) * (whole * (last - first) / number)
        return sorted(chosen[np.clip(np.searchsorted(begun, spread), 1, begun.size - 1)].tolist())

    def shift(self, *, device: bool, moment: int, by: int) -> None:
        """Move all of the device or of the host from a moment on."""
        own = self.on_device == device
        across = own & (self.start < moment) & (self.start + self.length > moment)
        if not device:
            self.length[across] += by
        self.start[own & (self.start >= moment)] += by
        for row in self.added:
            if row["process"].startswith("gpu") == device and row["start_ns"] >= moment:
                row["start_ns"] += by

    def _resume(self, wanted: int, at: int, cost_ns: int) -> None:
        """The host goes on `at` that moment, and fast until it is as far ahead as it was."""

        def moved(moment: Any) -> Any:
            fast = at + (moment - wanted) // 50
            return np.where(moment >= wanted, np.maximum(moment + cost_ns, fast), moment)

        own = ~self.on_device
        end = moved(self.start[own] + self.length[own])
        self.start[own] = moved(self.start[own])
        self.length[own] = end - self.start[own]
        for row in self.added:
            if not row["process"].startswith("gpu"):
                end = int(moved(row["start_ns"] + row["duration_ns"]))
                row["start_ns"] = int(moved(row["start_ns"]))
                row["duration_ns"] = end - row["start_ns"]

    def stall(self, place: int, cost_ns: int, spans: Iterable[dict[str, Any]] = ()) -> None:
        """The host launches a kernel `cost_ns` too late.

        `spans` are the host's meanwhile: `from` and `to` are 0 where the host would have launched,
        1 where the device runs dry, and 2 where it launches at last.
        """
        kernel, launch = int(self.kernels[place]), int(self.launches[place])
        dry, wanted = int(self.start[kernel]), int(self.start[self.opening.get(launch, launch)])
        dry = max(wanted, dry)
        marks = (wanted, dry, dry + cost_ns - 6_000)
        self._resume(wanted, dry + cost_ns - 3_000, cost_ns)
        self.shift(device=True, moment=int(self.start[kernel]), by=cost_ns)
        for span in spans:
            low, high = (_between(marks, span.pop(end)) for end in ("from", "to"))
            self.add({**span, "start_ns": low, "duration_ns": max(1, high - low)}, launch)

    def insert(
        self, place: int, works: Iterable[Work], around: dict[str, Any] | None = None
    ) -> None:
        """Work before a kernel, launched in time; `around` is a host span around its launches."""
        kernel, launch = int(self.kernels[place]), int(self.launches[place])
        works = list(works)
        begin, wanted = int(self.start[kernel]), int(self.start[self.opening.get(launch, launch)])
        room = len(works) * 1_000 + 2_000
        launched = [wanted + 1_000 + number * 1_000 for number in range(len(works))]
        clock, starts = begin, []
        for one, at in zip(works, launched, strict=True):
            starts.append(max(clock + one.gap_ns, at + 2_000))
            clock = starts[-1] + one.length_ns
        # Host and device move alike, so that what was launched late stays late and the rest not.
        whole = max(room, clock - begin)
        self.shift(device=False, moment=wanted, by=whole)
        self.shift(device=True, moment=begin, by=whole)
        process, _, lane = self.lane.partition(" stream ")
        for one, at, begun in zip(works, launched, starts, strict=True):
            self.flow += 1
            called = {"name": "cudaLaunchKernel", "category": "cuda_runtime", "flow_out": self.flow}
            self.add({**called, "start_ns": at, "duration_ns": 800}, launch)
            place_ = {"process": process, "lane": f"stream {lane}", "category": "kernel"}
            given = dict(one.more)
            if given.get("lane") == "main":
                given.pop("lane")
            self.add(
                {**place_, "kind": one.kind, "name": one.name, "start_ns": begun,
                 "duration_ns": one.length_ns, "flow_in": self.flow, **given}, None,
            )  # fmt: skip
        if around is not None:
            self.add({**around, "start_ns": wanted, "duration_ns": room - 500}, launch)

    def hold(self, place: int, cost_ns: int) -> None:
        """The device waits before a kernel that was launched."""
        self.shift(device=True, moment=int(self.start[self.kernels[place]]), by=cost_ns)

    def stretch(self, which: Callable[[int, int], bool], factor: float) -> int:
        """Kernels take `factor` times as long; what they take longer, in ns."""
        total = 0
        for row in self.kernels[np.argsort(self.start[self.kernels])].tolist():
            if which(row, int(self.start[row])):
                more = round(int(self.length[row]) * (factor - 1))
                self.shift(device=True, moment=int(self.start[row] + self.length[row]), by=more)
                self.length[row] += more
                total += more
        return total

    def step_starts(self) -> list[int]:
        """When steps start on the host, in order."""
        return sorted(
            int(self.start[row])
            for row, name in enumerate(self.columns["name"])
            if name.startswith("ProfilerStep") and not self.on_device[row]
        )

    def add(self, row: dict[str, Any], beside: int | None) -> None:
        """A row, in the process and lane of the one beside it."""
        place = {} if beside is None else {
            "process": self.columns["process"][beside], "lane": self.columns["lane"][beside],
        }  # fmt: skip
        self.added.append({**DEFAULTS, **place, **row})

    def timeline(self, counters: dict[str, Any] | None = None) -> Timeline:
        """The timeline with what was planted."""
        columns: dict[str, Any] = {"rank": self.rank}
        whole = {
            **self.columns, "start_ns": self.start.tolist(), "duration_ns": self.length.tolist(),
            "flow_out": self.flow_out.tolist(), **self.others,
        }  # fmt: skip
        for name in (*_STRINGS, *_NUMBERS):
            columns[name] = whole[name] + [row[name] for row in self.added]
        made = Timeline.from_columns(
            columns, counters, source=self.part.source, metadata=self.part.metadata
        )
        if counters is None:
            made = msgspec.structs.replace(made, counters=self.part.counters)
        return made


def _quiet(spans: DeviceSpans) -> Any:
    """Which device spans start when nothing else runs."""
    reach = np.maximum.accumulate(spans.end)
    return np.append(True, spans.start[1:] >= reach[:-1])


def _between(marks: tuple[int, int, int], at: float) -> int:
    low = min(1, int(at))
    return round(marks[low] + (marks[low + 1] - marks[low]) * (at - low))
