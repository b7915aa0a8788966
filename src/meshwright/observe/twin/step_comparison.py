"""Two timelines of the same step held against each other. It knows no clocks and no layouts.

Passes are the spans that `policy.pipeline.pass_spans` names. A simulated timeline has one rank for
each pipeline stage, a measured one has all of them: each is compared with the one of its stage.

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
from meshwright.policy.pipeline.pass_spans import LANE, OVERLAPPED_LANE, PASS_NAMES
from meshwright.timeline import Timeline

MAX_BUBBLE_POINTS = 5.0
"""How far bubbles may lie apart, in points of a hundred."""
MAX_STEP_ERROR = 0.15
"""How far steps may lie apart, as a share of the measured one."""


class ComparedPass(NamedTuple):
    """One pass of a microbatch through a chunk."""

    name: str
    chunk: int
    microbatch: int
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.name} of microbatch {self.microbatch} in chunk {self.chunk}"


class StepPhases(NamedTuple):
    """A step by what its time is spent on; seconds."""

    step_s: float
    passes_s: float
    """In passes, on the mean over ranks."""
    bubble_s: float
    """In none while their pipeline is, on the mean over ranks."""

    @property
    def bubble_share(self) -> float:
        """Share of the pass phase."""
        return self.bubble_s / (self.passes_s + self.bubble_s)

    @property
    def outside_passes_s(self) -> float:
        """Before and after all passes: exchange and update."""
        return self.step_s - self.passes_s - self.bubble_s


class PassDurations(NamedTuple):
    """How long passes of one kind take, on the mean."""

    name: str
    num_passes: int
    predicted_s: float
    measured_s: float


class StepComparison(NamedTuple):
    """What the two have in common and what not."""

    order_difference: str
    """The first pass that comes in another order; empty where none does."""
    predicted: StepPhases
    measured: StepPhases
    pass_durations: tuple[PassDurations, ...]

    @property
    def bubble_points(self) -> float:
        """Predicted less measured bubble, in points of a hundred."""
        return 100 * (self.predicted.bubble_share - self.measured.bubble_share)

    @property
    def step_error(self) -> float:
        """Predicted over measured step, less one."""
        return self.predicted.step_s / self.measured.step_s - 1

    @property
    def is_within_tolerance(self) -> bool:
        """Whether all is within what is let through."""
        near = (
            abs(self.bubble_points) <= MAX_BUBBLE_POINTS and abs(self.step_error) <= MAX_STEP_ERROR
        )
        return not self.order_difference and near


def compare_steps(predicted: Timeline, measured: Timeline) -> StepComparison:
    """Hold a measured step against the predicted one."""
    wanted, found = find_passes(predicted, "predicted"), find_passes(measured, "measured")
    by_stage = {stage: lane for (_, stage), lane in wanted.items()}
    missing = sorted({stage for _, stage in found} ^ set(by_stage))
    if missing:
        what = f"stage {missing[0]} has passes in one of the timelines only"
        raise InputError([Problem("measured", what, "compare steps of the same layout")])
    difference = ""
    for (rank, stage), lane in sorted(found.items()):
        difference = difference or _first_difference(by_stage[stage], lane, rank)
    phases = _phase(predicted, wanted), _phase(measured, found)
    return StepComparison(difference, *phases, _lengths(wanted, found))


PassesByRank = dict[tuple[int, int], list[ComparedPass]]
"""By rank and stage, in order."""


def find_passes(timeline: Timeline, where: str = "timeline") -> PassesByRank:
    """Return the passes of every rank in the order they begin."""
    lanes, names, extras = (timeline.string_column(each) for each in ("lane", "name", "extra"))
    words = set(PASS_NAMES.values())
    is_lane = [str(value) in (LANE, OVERLAPPED_LANE) for value in lanes.values]
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
    found: dict[tuple[int, int], list[tuple[int, int, ComparedPass]]] = {}
    for lane, name, extra, rank, stage, microbatch, start, duration in rows:
        if lane < 0 or not is_lane[lane] or str(names.values[name]) not in words:
            continue
        one = ComparedPass(
            str(names.values[name]), chunk_of[extra], microbatch, start / 1e9,
            (start + duration) / 1e9,
        )  # fmt: skip
        beside = str(lanes.values[lane]) == OVERLAPPED_LANE
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


def _first_difference(
    wanted: Sequence[ComparedPass], found: Sequence[ComparedPass], rank: int
) -> str:
    for number, (one, other) in enumerate(zip_longest(wanted, found)):
        if one is None or other is None or one[:3] != other[:3]:
            return (
                f"pass {number} of rank {rank} is {other or 'missing'}, "
                f"predicted was {one or 'none'}"
            )
    return ""


def _phase(timeline: Timeline, lanes: PassesByRank) -> StepPhases:
    busy, bubble = [], []
    for pipeline in _pipelines(lanes):
        every = [one for lane in pipeline for one in lane]
        length = max(one.end_s for one in every) - min(one.start_s for one in every)
        covered = [_covered_s(lane) for lane in pipeline]
        busy += covered
        bubble += [length - each for each in covered]
    first, last = timeline.extent_ns
    step_s = float(timeline.metadata.get("step_s", (last - first) / 1e9))
    return StepPhases(step_s, fmean(busy), fmean(bubble))


def _pipelines(lanes: PassesByRank) -> list[tuple[list[ComparedPass], ...]]:
    """Return the passes of ranks that hand each other microbatches: one of every stage.

    In any order of the axes, ranks of different stages that are equal in all else are equally far
    on among those of their stage.
    """
    by_stage: dict[int, list[list[ComparedPass]]] = {}
    for (_, stage), lane in sorted(lanes.items()):
        by_stage.setdefault(stage, []).append(lane)
    if len({len(ranks) for ranks in by_stage.values()}) > 1:  # ranks are missing
        return [tuple(lanes.values())]
    return list(zip(*by_stage.values(), strict=True))


def _covered_s(lane: Sequence[ComparedPass]) -> float:
    """Return how long a rank is in some pass: those side by side count once."""
    covered, until = 0.0, float("-inf")
    for one in lane:  # by their start
        covered += max(0.0, one.end_s - max(one.start_s, until))
        until = max(until, one.end_s)
    return covered


def _lengths(wanted: PassesByRank, found: PassesByRank) -> tuple[PassDurations, ...]:
    """Return how long each kind of pass takes; predicted are those that run alone."""
    sides = [_by_name(lanes) for lanes in (wanted, found)]
    return tuple(
        PassDurations(name, len(sides[1][name]), fmean(sides[0][name]), fmean(sides[1][name]))
        for name in PASS_NAMES.values()
        if sides[0].get(name) and sides[1].get(name)
    )


def _by_name(lanes: PassesByRank) -> dict[str, list[float]]:
    """Return the lengths of passes by name; of those side by side nobody knows how long each is."""
    found: dict[str, list[float]] = {}
    for lane in lanes.values():
        together = Counter(one.start_s for one in lane)
        for one in lane:
            if together[one.start_s] == 1:
                found.setdefault(one.name, []).append(one.end_s - one.start_s)
    return found
