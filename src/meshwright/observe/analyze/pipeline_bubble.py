"""Pipeline bubbles, and which schedule a timeline shows.

Passes are spans called `forward`, `backward`, `backward-input`, `backward-weight` with a stage and
a microbatch, as our trainer and our simulator write them. Where a timeline has none, sends and
receives of activations and gradients stand for them. Ranks are put together to pipelines, one rank
of each stage, and their passes are parted into steps. Their order names the schedule, as
`schedule_match` compares it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.observe.analyze.schedule_match import (
    SchedulePass,
    build_schedule_orders,
    score_schedules,
)
from meshwright.observe.analyze.spans.intervals import Ints, match_values, measure_total_ns, union
from meshwright.policy.pipeline.pass_spans import LANE, PASS_NAMES
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.spec.layout import ScheduleKind

MIN_MATCH_SCORE = 0.9
"""A schedule is named where so many passes stand where it puts them."""
MAX_COMPARED_STEPS = 32
"""Steps of pipelines whose order is compared with the schedules' orders, spread over all."""

_FORWARD = re.compile(r"(?i)activation|forward|fwd")
_BACKWARD = re.compile(r"(?i)gradient|backward|bwd")


class RankBubble(NamedTuple):
    """What one pipeline rank did in the time of its pipeline's passes, all steps together."""

    rank: int
    stage: int
    busy_ns: int
    bubble_ns: int
    """No pass ran."""
    warmup_ns: int
    """Before its first pass."""

    @property
    def bubble_share(self) -> float:
        """Part of the time that is bubble."""
        whole = self.busy_ns + self.bubble_ns
        return self.bubble_ns / whole if whole else 0.0


class PipelineAnalysis(NamedTuple):
    """How the pipelines of a run ran: every replica of the model has its own."""

    schedule: str
    """Its kind, such as `1f1b`; empty where no kind agrees."""
    match_score: float
    """Part of the passes that stand where that schedule puts them."""
    runner_up: str
    """The kind that agrees next best."""
    num_microbatches: int
    chunks_per_rank: int
    ranks: tuple[RankBubble, ...]
    """None where only messages told the schedule."""
    window_ns: tuple[int, int]
    num_stages: int = 0
    num_steps: int = 1
    """How many were seen whole; what the profile cuts off is left out."""

    @property
    def bubble_share(self) -> float:
        """Part of all ranks' time that is bubble."""
        busy = sum(one.busy_ns for one in self.ranks)
        lost = sum(one.bubble_ns for one in self.ranks)
        return lost / (busy + lost) if busy + lost else 0.0


def analyze_pipeline(timeline: Timeline) -> PipelineAnalysis | None:
    """Return the pipeline of a run; None where the timeline has no passes of several stages."""
    parts = [
        (int(part.column("rank")[0]), part) for part in timeline.split_by_rank() if part.num_spans
    ]
    found = {rank: own for rank, part in parts if (own := _passes(part))}
    if len({own[0].stage for own in found.values()}) < 2:
        return _by_messages(parts)
    runs = [run for ranks in _replicas(found) for run in _steps_of(ranks, found)]
    seen: dict[int, list[RankBubble]] = defaultdict(list)
    for run in runs:
        low = min(int(one.start.min()) for one in run.values())
        high = max(int((one.start + one.length).max()) for one in run.values())
        for rank, one in run.items():
            seen[rank].append(_bubble(rank, one, low, high))
    ranks = sorted((_summed(own) for own in seen.values()), key=lambda one: (one.stage, one.rank))
    stages = _stages(timeline, found)
    listed = [_listed(run) for run in runs[:: -(-len(runs) // MAX_COMPARED_STEPS)]]
    names = score_schedules(listed, stages)
    best, second = names[0], names[1]
    passes = [one for run in runs for one in run.values()]
    return PipelineAnalysis(
        best[1] if best[0] >= MIN_MATCH_SCORE else "",
        best[0],
        second[1],
        1 + max(int(one.microbatch.max()) for one in passes),
        max(len(set(one.layer.tolist())) for one in passes),
        tuple(ranks),
        (
            min(int(one.start.min()) for one in passes),
            max(int((one.start + one.length).max()) for one in passes),
        ),
        stages,
        max(map(len, seen.values())),
    )


def _replicas(found: "dict[int, list[_Passes]]") -> list[list[int]]:
    """Put ranks together to pipelines: the n-th rank of a stage works with the n-th of the others.

    That holds for any order of the axes, as ranks of a stage stand in the order of their places on
    the other axes. Where ranks are missing it cannot be told, and all count as one: replicas wait
    for each other at the end of a step, so their times are much the same.
    """
    by_stage: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(found):
        by_stage[found[rank][0].stage].append(rank)
    if len({len(ranks) for ranks in by_stage.values()}) > 1:
        return [sorted(found)]
    return [list(ranks) for ranks in zip(*by_stage.values(), strict=True)]


def _steps_of(
    ranks: Sequence[int], found: "dict[int, list[_Passes]]"
) -> "list[dict[int, _Passes]]":
    """The passes of one pipeline, step by step.

    Where a profile cuts off more steps of one rank than of another, those nearest in time belong
    together.
    """
    if len({len(found[rank]) for rank in ranks}) == 1:
        return [
            dict(zip(ranks, run, strict=True))
            for run in zip(*(found[r] for r in ranks), strict=True)
        ]
    fewest = min(ranks, key=lambda rank: len(found[rank]))
    return [
        {
            rank: min(found[rank], key=lambda one: abs(int(one.start[0] - lead.start[0])))
            for rank in ranks
        }
        for lead in found[fewest]
    ]


def _stages(timeline: Timeline, found: "dict[int, list[_Passes]]") -> int:
    """How many stages there are: as the run says, else as many as are seen."""
    said = timeline.metadata.get("stages", "")
    seen = 1 + max(own[0].stage for own in found.values())
    return max(seen, int(said) if said.isdecimal() and len(said) < 6 else 0)


def _summed(own: Sequence[RankBubble]) -> RankBubble:
    rank, stage = own[0].rank, own[0].stage
    return RankBubble(rank, stage, *map(sum, list(zip(*own, strict=True))[2:]))


def _by_messages(parts: list[tuple[int, Timeline]]) -> PipelineAnalysis | None:
    """Name the schedule by the order of messages between ranks; they do not show bubbles.

    A rank sends activations when a forward is done and gradients when a backward is. The first and
    the last send only one of them, so those between tell. Backwards of weights send nothing:
    `1f1b` stands for the zero-bubble kinds with the same order too.
    """
    found = [(_stage_of(part), _once(_messages(part))) for _, part in parts]
    # Ranks of one stage send alike; without stages every rank is one.
    told = {stage for stage, _ in found}
    of_stage = dict(found) if -1 not in told else dict(enumerate(one for _, one in found))
    inner = [place for place, one in of_stage.items() if "F" in one and "B" in one]
    stages = 1 + max(of_stage, default=-1)
    if not inner:
        return None
    microbatches = max(of_stage[place].count("F") for place in inner)
    scores = []
    kinds: tuple[ScheduleKind, ...] = ("gpipe", "1f1b")
    for kind in kinds:
        lanes = build_schedule_orders(kind, stages, microbatches, 1)
        if not lanes:
            return None
        planned = ["".join(op for op, _, _ in lanes[place]) for place in inner]
        pairs = zip((of_stage[place] for place in inner), planned, strict=True)
        same = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=False))
        scores.append((same / sum(map(len, planned)), kind))
    scores.sort(reverse=True)
    known = scores[0][0] >= MIN_MATCH_SCORE and scores[0][0] > scores[1][0]
    name = scores[0][1] if known else ""
    return PipelineAnalysis(
        name, scores[0][0], scores[1][1], microbatches, 1, (), _extent(parts), stages
    )


def _stage_of(part: Timeline) -> int:
    """The stage that a rank's sends are of; -1 where it is not said."""
    sends = match_values(part.string_column("collective"), lambda word: word == "send")
    return int(part.column("stage")[sends].max(initial=-1))


def _once(letters: str) -> str:
    """What repeats from step to step, once."""
    for length in range(1, len(letters) // 2 + 1):
        if len(letters) % length == 0 and letters[:length] * (len(letters) // length) == letters:
            return letters[:length]
    return letters


def _extent(parts: list[tuple[int, Timeline]]) -> tuple[int, int]:
    extents = [part.extent_ns for _, part in parts]
    return min(low for low, _ in extents), max(high for _, high in extents)


def _messages(part: Timeline) -> str:
    """The forwards and backwards that one rank sent the results of, as letters."""
    names = part.string_column("name")
    sends = match_values(part.string_column("collective"), lambda word: word == "send")
    start = part.column("start_ns")
    moments: list[tuple[int, str]] = []
    for letter, pattern in (("F", _FORWARD), ("B", _BACKWARD)):
        own = match_values(names, pattern.search)
        moments += [(time, letter) for time in start[own & sends].tolist()]
    return "".join(letter for _, letter in sorted(moments))


class _Passes(NamedTuple):
    """The passes of one rank in one step, in the order of time."""

    op: list[str]
    stage: int
    start: Ints
    length: Ints
    microbatch: Ints
    layer: Ints


def _passes(part: Timeline) -> list[_Passes]:
    """The passes of one rank, step by step; steps that were not seen whole are left out."""
    letters = {name: op for op, name in PASS_NAMES.items()}
    names, microbatch = part.string_column("name"), part.column("microbatch")
    chosen = match_values(names, lambda name: name in letters) & (microbatch >= 0)
    chosen &= match_values(part.string_column("lane"), lambda lane: lane.startswith(LANE))
    rows = np.flatnonzero(chosen)
    if not rows.size:
        return []
    start, layer, stage = part.column("start_ns"), part.column("layer"), part.column("stage")
    # What starts together keeps the order of its rows: the forward of a pair stands first.
    rows = rows[np.argsort(start[rows], kind="stable")]
    op = [letters[names.values[code]] for code in names.codes[rows].tolist()]
    cuts = [0, *_begins(op, layer[rows].tolist(), microbatch[rows].tolist()), rows.size]
    whole = Counter(b - a for a, b in pairwise(cuts)).most_common(1)[0][0]
    return [
        _Passes(
            op[a:b],
            int(stage[rows[a]]),
            start[rows[a:b]],
            part.column("duration_ns")[rows[a:b]],
            microbatch[rows[a:b]],
            layer[rows[a:b]],
        )
        for a, b in pairwise(cuts)
        if b - a == whole
    ]


def _begins(op: list[str], layer: list[int], microbatch: list[int]) -> list[int]:
    """Where steps after the first begin: some chunk's forwards count microbatches anew."""
    last: dict[int, int] = {}
    times: Counter[int] = Counter()
    found: list[int] = []
    for place, (what, chunk, number) in enumerate(zip(op, layer, microbatch, strict=True)):
        if what != "F":
            continue
        if number <= last.get(chunk, -1):
            times[chunk] += 1
            if times[chunk] > len(found):
                found.append(place)
        last[chunk] = number
    return found


def _bubble(rank: int, passes: _Passes, low: int, high: int) -> RankBubble:
    end = passes.start + passes.length
    busy = measure_total_ns(union(passes.start, end))
    return RankBubble(
        rank,
        passes.stage,
        busy,
        high - low - busy,
        int(passes.start.min()) - low,
    )


def _listed(run: dict[int, _Passes]) -> dict[int, list[SchedulePass]]:
    """The passes of every stage by chunk; chunks are numbered by their first layers."""
    by_stage = {one.stage: one for one in run.values()}
    layers = sorted({layer for one in by_stage.values() for layer in one.layer.tolist()})
    chunk = {layer: number for number, layer in enumerate(layers)}
    if all(len(set(one.layer.tolist())) == 1 for one in by_stage.values()):
        # A stage is a chunk then, also where some stages are not there.
        chunk = {int(one.layer[0]): stage for stage, one in by_stage.items()}
    return {
        stage: [
            (op, chunk[layer], number)
            for op, layer, number in zip(
                one.op, one.layer.tolist(), one.microbatch.tolist(), strict=True
            )
        ]
        for stage, one in by_stage.items()
    }
