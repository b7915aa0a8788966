"""Plants faults of known cost in a rank's timeline, simulated or real.

stall     the host does something else before it launches a kernel; the device waits
insert    work that was not there, launched in time
hold      the device waits though the kernel was launched
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.steps import counted, cut_ns, launch_rows
from meshwright.timeline.timeline import Timeline
from tests.observe.findings.clean_jobs import DEFAULTS

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
            coded = part.strings(name)
            words = [*coded.values, None]
            self.columns[name] = [words[code] for code in coded.codes.tolist()]
        self.start = part.column("start_ns").copy()
        self.length = part.column("duration_ns").copy()
        self.flow_out = part.column("flow_out").copy()
        self.others = {name: part.column(name).tolist() for name in ("flow_in", "bytes")}
        self.opening: dict[int, int] = {}
        self.added: list[dict[str, Any]] = []
        spans = counted(part)
        self.window_ns = spans.window_ns[1] - spans.window_ns[0]
        launch = launch_rows(part, spans)
        lanes = np.bincount(spans.lane[spans.kind == 0], (spans.end - spans.start)[spans.kind == 0])
        plain = (launch >= 0) & (spans.kind == 0) & (spans.lane == int(lanes.argmax()))
        plain &= self._clear(launch)
        self.kernels = spans.row[plain]
        self.launches = launch[plain]
        self.lane = spans.lanes[int(lanes.argmax())]
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
        lane, end = self.part.strings("lane").codes, self.start + self.length
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

    def places(self, number: int, *, first: float = 0.05, last: float = 0.95) -> list[int]:
        """Kernels spread over the window, in order of time."""
        count = self.kernels.size
        spread = np.linspace(first * count, last * count - 1, number)
        jitter = self.random.uniform(-0.4, 0.4, number) * (count * (last - first) / number)
        return sorted(np.clip(spread + jitter, 1, count - 1).astype(int).tolist())

    def _shift(self, *, device: bool, moment: int, by: int) -> None:
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
        self._shift(device=True, moment=int(self.start[kernel]), by=cost_ns)
        for span in spans:
            low, high = (_between(marks, span.pop(end)) for end in ("from", "to"))
            self._add({**span, "start_ns": low, "duration_ns": max(1, high - low)}, launch)

    def insert(
        self, place: int, works: Iterable[Work], around: dict[str, Any] | None = None
    ) -> None:
        """Work before a kernel, launched in time; `around` is a host span around its launches."""
        kernel, launch = int(self.kernels[place]), int(self.launches[place])
        works = list(works)
        begin, wanted = int(self.start[kernel]), int(self.start[self.opening.get(launch, launch)])
        room = len(works) * 1_000 + 2_000
        # Host and device move alike, so that what was launched late stays late and the rest not.
        late = max(0, wanted + room - begin)
        whole = max(room, late + sum(one.length_ns + one.gap_ns for one in works))
        self._shift(device=False, moment=wanted, by=whole)
        self._shift(device=True, moment=begin, by=whole)
        process, _, lane = self.lane.partition(" stream ")
        clock = begin + late
        for number, one in enumerate(works):
            self.flow += 1
            called = {"name": "cudaLaunchKernel", "category": "cuda_runtime", "flow_out": self.flow}
            at = wanted + 1_000 + number * 1_000
            self._add({**called, "start_ns": at, "duration_ns": 800}, launch)
            clock += one.gap_ns
            place_ = {"process": process, "lane": f"stream {lane}", "category": "kernel"}
            given = dict(one.more)
            if given.get("lane") == "main":
                given.pop("lane")
            self._add(
                {**place_, "kind": one.kind, "name": one.name, "start_ns": clock,
                 "duration_ns": one.length_ns, "flow_in": self.flow, **given}, None,
            )  # fmt: skip
            clock += one.length_ns
        if around is not None:
            self._add({**around, "start_ns": wanted, "duration_ns": room - 500}, launch)

    def hold(self, place: int, cost_ns: int) -> None:
        """The device waits before a kernel that was launched."""
        self._shift(device=True, moment=int(self.start[self.kernels[place]]), by=cost_ns)

    def stretch(self, which: Callable[[int, int], bool], factor: float) -> int:
        """Kernels take `factor` times as long; what they take longer, in ns."""
        total = 0
        for row in self.kernels[np.argsort(self.start[self.kernels])].tolist():
            if which(row, int(self.start[row])):
                more = round(int(self.length[row]) * (factor - 1))
                self._shift(device=True, moment=int(self.start[row] + self.length[row]), by=more)
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

    def _add(self, row: dict[str, Any], beside: int | None) -> None:
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


def _between(marks: tuple[int, int, int], at: float) -> int:
    low = min(1, int(at))
    return round(marks[low] + (marks[low + 1] - marks[low]) * (at - low))


def has_steps(part: Timeline) -> bool:
    """Whether the timeline is long enough for the last step to be left out."""
    return cut_ns(part) is not None
