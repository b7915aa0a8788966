"""Two timelines of the same step held against each other. It knows no clocks and no layouts.

Passes are the spans that `policy.pipeline.spans` names. A simulated timeline has one rank for each
pipeline stage, a measured one has all of them: each is compared with the one of its stage.

The pass phase lasts from the start of the first pass to the end of the last, on any rank of the
same pipeline. Its bubble is the share of it that a rank spends in no pass, on the mean over ranks:
waiting for others, for messages, and what the host does in between. Around it lie exchange of
gradients, update, what a step does once, and waiting for replicas that are slower, which a
simulated timeline does not have.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline.spans import BESIDE, LANE, NAMES
from meshwright.timeline import Timeline

BUBBLE_POINTS = 5.0
"""How far bubbles may lie apart, in points of a hundred."""
STEP_SHARE = 0.15
"""How far steps may lie apart, as a share of the measured one."""


class Pass(NamedTuple):
    """One pass of a microbatch through a chunk."""

    name: str
    chunk: int
    microbatch: int
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.name} of microbatch {self.microbatch} in chunk {self.chunk}"


class Phase(NamedTuple):
    """A step by what its time is spent on; seconds."""

    step_s: float
    passes_s: float
    """In passes, on the mean over ranks."""
    bubble_s: float
    """In none while their pipeline is, on the mean over ranks."""

    @property
    def bubble(self) -> float:
        """Share of the pass phase."""
        return self.bubble_s / (self.passes_s + self.bubble_s)

    @property
    def around_s(self) -> float:
        """Before and after all passes: exchange and update."""
        return self.step_s - self.passes_s - self.bubble_s


class Lengths(NamedTuple):
    """How long passes of one kind take, on the mean."""

    name: str
    passes: int
    predicted_s: float
    measured_s: float


class Comparison(NamedTuple):
    """What the two have in common and what not."""

    difference: str
    """The first pass that comes in another order; empty where none does."""
    predicted: Phase
    measured: Phase
    lengths: tuple[Lengths, ...]

    @property
    def bubble_points(self) -> float:
        """Predicted less measured bubble, in points of a hundred."""
        return 100 * (self.predicted.bubble - self.measured.bubble)

    @property
    def step_error(self) -> float:
        """Predicted over measured step, less one."""
        return self.predicted.step_s / self.measured.step_s - 1

    @property
    def agrees(self) -> bool:
        """Whether all is within what is let through."""
        near = abs(self.bubble_points) <= BUBBLE_POINTS and abs(self.step_error) <= STEP_SHARE
        return not self.difference and near


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Hold a measured step against the predicted one."""
    wanted, found = passes_of(predicted, "predicted"), passes_of(measured, "measured")
    by_stage = {stage: lane for (_, stage), lane in wanted.items()}
    missing = sorted({stage for _, stage in found} ^ set(by_stage))
    if missing:
        what = f"stage {missing[0]} has passes in one of the timelines only"
        raise InputError([Problem("measured", what, "compare steps of the same layout")])
    difference = ""
    for (rank, stage), lane in sorted(found.items()):
        difference = difference or _first_difference(by_stage[stage], lane, rank)
    phases = _phase(predicted, wanted), _phase(measured, found)
    return Comparison(difference, *phases, _lengths(wanted, found))


Lanes = dict[tuple[int, int], list[Pass]]
"""By rank and stage, in order."""


def passes_of(timeline: Timeline, where: str = "timeline") -> Lanes:
    """Return the passes of every rank in the order they begin."""
    lanes, names, extras = (timeline.strings(each) for each in ("lane", "name", "extra"))
    words = set(NAMES.values())
    is_lane = [str(value) in (LANE, BESIDE) for value in lanes.values]
    chunk_of = [_chunk(value) for value in extras.values]
    columns = [timeline.column(each) for each in ("rank", "stage", "microbatch", "start_ns")]
    rows = zip(
        lanes.codes.tolist(),
        names.codes.tolist(),
        extras.codes.tolist(),
        *(column.tolist() for column in columns),
        timeline.column("duration_ns").tolist(),
        strict=True,
    )
    found: dict[tuple[int, int], list[tuple[int, int, Pass]]] = {}
    for lane, name, extra, rank, stage, microbatch, start, duration in rows:
        if lane < 0 or not is_lane[lane] or str(names.values[name]) not in words:
            continue
        one = Pass(
            str(names.values[name]), chunk_of[extra], microbatch, start / 1e9,
            (start + duration) / 1e9,
        )  # fmt: skip
        beside = str(lanes.values[lane]) == BESIDE
        found.setdefault((rank, stage), []).append((start, int(beside), one))
    if not found:
        fix = f"record spans on the lane {LANE!r}"
        raise InputError([Problem(where, "the timeline has no passes", fix)])
    return {
        key: [one for *_, one in sorted(some, key=lambda each: each[:2])]
        for key, some in found.items()
    }


def _chunk(extra: Any) -> int:
    try:
        return int(msgspec.json.decode(str(extra))["chunk"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return 0


def _first_difference(wanted: Sequence[Pass], found: Sequence[Pass], rank: int) -> str:
    for number, (one, other) in enumerate(zip_longest(wanted, found)):
        if one is None or other is None or one[:3] != other[:3]:
            return (
                f"pass {number} of rank {rank} is {other or 'missing'}, "
                f"predicted was {one or 'none'}"
            )
    return ""


def _phase(timeline: Timeline, lanes: Lanes) -> Phase:
    busy, bubble = [], []
    for pipeline in _pipelines(lanes):
        every = [one for lane in pipeline for one in lane]
        length = max(one.end_s for one in every) - min(one.start_s for one in every)
        covered = [_covered_s(lane) for lane in pipeline]
        busy += covered
        bubble += [length - each for each in covered]
    first, last = timeline.extent_ns
    step_s = float(timeline.metadata.get("step_s", (last - first) / 1e9))
    return Phase(step_s, fmean(busy), fmean(bubble))


def _pipelines(lanes: Lanes) -> list[tuple[list[Pass], ...]]:
    """Return the passes of ranks that hand each other microbatches: one of every stage.

    In any order of the axes, ranks of different stages that are equal in all else are equally far
    on among those of their stage.
    """
    by_stage: dict[int, list[list[Pass]]] = {}
    for (_, stage), lane in sorted(lanes.items()):
        by_stage.setdefault(stage, []).append(lane)
    if len({len(ranks) for ranks in by_stage.values()}) > 1:  # ranks are missing
        return [tuple(lanes.values())]
    return list(zip(*by_stage.values(), strict=True))


def _covered_s(lane: Sequence[Pass]) -> float:
    """Return how long a rank is in some pass: those side by side count once."""
    covered, until = 0.0, float("-inf")
    for one in lane:  # by their start
        covered += max(0.0, one.end_s - max(one.start_s, until))
        until = max(until, one.end_s)
    return covered


def _lengths(wanted: Lanes, found: Lanes) -> tuple[Lengths, ...]:
    """Return how long each kind of pass takes; predicted are those that run alone."""
    sides = [_by_name(lanes) for lanes in (wanted, found)]
    return tuple(
        Lengths(name, len(sides[1][name]), fmean(sides[0][name]), fmean(sides[1][name]))
        for name in NAMES.values()
        if sides[0].get(name) and sides[1].get(name)
    )


def _by_name(lanes: Lanes) -> dict[str, list[float]]:
    """Return the lengths of passes by name; of those side by side nobody knows how long each is."""
    found: dict[str, list[float]] = {}
    for lane in lanes.values():
        together = Counter(one.start_s for one in lane)
        for one in lane:
            if together[one.start_s] == 1:
                found.setdefault(one.name, []).append(one.end_s - one.start_s)
    return found
