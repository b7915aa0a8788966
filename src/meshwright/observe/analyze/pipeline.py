"""Pipeline bubbles, and which schedule a timeline shows.

Passes are spans called `forward`, `backward`, `backward-input`, `backward-weight` with a stage and
a microbatch, as our trainer and our simulator write them. Where a timeline has none, sends and
receives of activations and gradients stand for them. The order on every rank is compared with the
orders that each kind of schedule would give; the one that agrees best is named.
"""

import re
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from meshwright.errors import InputError
from meshwright.observe.analyze.spans import Ints, measure, union, where
from meshwright.policy.pipeline.spans import LANE, NAMES
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.policy.pipeline import Action

Pass = tuple[str, int, int]
"""What is done (`F`, `B`, `I`, `W`), with which chunk, for which microbatch."""
LEAST_AGREEMENT = 0.9
"""A schedule is named where so many passes stand where it puts them."""

_FORWARD = re.compile(r"(?i)activation|forward|fwd")
_BACKWARD = re.compile(r"(?i)gradient|backward|bwd")


class RankBubble(NamedTuple):
    """What one pipeline rank did in the time of all passes."""

    rank: int
    stage: int
    busy_ns: int
    bubble_ns: int
    """No pass ran."""
    warmup_ns: int
    """Before its first pass."""
    drain_ns: int
    """After its last pass."""

    @property
    def share(self) -> float:
        """Part of the time that is bubble."""
        whole = self.busy_ns + self.bubble_ns
        return self.bubble_ns / whole if whole else 0.0


class Pipeline(NamedTuple):
    """How a pipeline ran."""

    schedule: str
    """Its kind, such as `1f1b`; empty where no kind agrees."""
    agreement: float
    """Part of the passes that stand where that schedule puts them."""
    runner_up: str
    """The kind that agrees next best."""
    microbatches: int
    chunks_per_rank: int
    ranks: tuple[RankBubble, ...]
    """None where only messages told the schedule."""
    window_ns: tuple[int, int]

    @property
    def bubble_share(self) -> float:
        """Part of all ranks' time that is bubble."""
        busy = sum(one.busy_ns for one in self.ranks)
        lost = sum(one.bubble_ns for one in self.ranks)
        return lost / (busy + lost) if busy + lost else 0.0


def pipeline(timeline: Timeline) -> Pipeline | None:
    """Return the pipeline of a step; None where the timeline has no passes of several stages."""
    parts = [(int(part.column("rank")[0]), part) for part in timeline.by_rank() if part.num_spans]
    found = {rank: own for rank, part in parts if (own := _passes(part)) is not None}
    if len(found) < 2:
        return _by_messages(parts)
    low = min(int(one.start.min()) for one in found.values())
    high = max(int((one.start + one.length).max()) for one in found.values())
    ordered = sorted(found.items(), key=lambda item: (item[1].stage, item[0]))
    ranks = tuple(_bubble(rank, one, low, high) for rank, one in ordered)
    listed = _listed([one for _, one in ordered])
    names = _kinds(listed)
    best, second = names[0], names[1]
    known = best[0] >= LEAST_AGREEMENT
    microbatches = 1 + max(number for own in listed for _, _, number in own)
    held = max(len({chunk for _, chunk, _ in own}) for own in listed)
    return Pipeline(
        best[1] if known else "",
        best[0],
        second[1],
        microbatches,
        held,
        ranks,
        (low, high),
    )


def _by_messages(parts: list[tuple[int, Timeline]]) -> Pipeline | None:
    """Name the schedule by the order of messages between ranks; they do not show bubbles.

    A rank sends activations when a forward is done and gradients when a backward is. The first and
    the last send only one of them, so those between tell. Backwards of weights send nothing:
    `1f1b` stands for the zero-bubble kinds with the same order too.
    """
    found = [_messages(part) for _, part in parts]
    inner = [place for place, one in enumerate(found) if "F" in one and "B" in one]
    if not inner:
        return None
    microbatches = max(found[place].count("F") for place in inner)
    from meshwright.policy.pipeline import build

    scores = []
    for kind in ("gpipe", "1f1b"):
        lanes = build(kind, len(found), microbatches).actions
        planned = ["".join(one.op for one in lanes[place]) for place in inner]
        pairs = zip((found[place] for place in inner), planned, strict=True)
        same = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=False))
        scores.append((same / sum(map(len, planned)), kind))
    scores.sort(reverse=True)
    known = scores[0][0] >= LEAST_AGREEMENT and scores[0][0] > scores[1][0]
    low, high = _extent(parts)
    name = scores[0][1] if known else ""
    return Pipeline(name, scores[0][0], scores[1][1], microbatches, 1, (), (low, high))


def _extent(parts: list[tuple[int, Timeline]]) -> tuple[int, int]:
    extents = [part.extent_ns for _, part in parts]
    return min(low for low, _ in extents), max(high for _, high in extents)


def _messages(part: Timeline) -> str:
    """The forwards and backwards that one rank sent the results of, as letters."""
    names = part.strings("name")
    sends = where(part.strings("collective"), lambda word: word == "send")
    start = part.column("start_ns")
    moments: list[tuple[int, str]] = []
    for letter, pattern in (("F", _FORWARD), ("B", _BACKWARD)):
        own = where(names, pattern.search)
        moments += [(time, letter) for time in start[own & sends].tolist()]
    return "".join(letter for _, letter in sorted(moments))


class _Passes(NamedTuple):
    op: list[str]
    stage: int
    start: Ints
    length: Ints
    microbatch: Ints
    layer: Ints


def _passes(part: Timeline) -> _Passes | None:
    """The passes of one rank in the order of time."""
    letters = {name: op for op, name in NAMES.items()}
    names, microbatch = part.strings("name"), part.column("microbatch")
    chosen = where(names, lambda name: name in letters) & (microbatch >= 0)
    chosen &= where(part.strings("lane"), lambda lane: lane.startswith(LANE))
    rows = np.flatnonzero(chosen)
    if not rows.size:
        return None
    start = part.column("start_ns")
    # What starts together keeps the order of its rows: the forward of a pair stands first.
    rows = rows[np.argsort(start[rows], kind="stable")]
    return _Passes(
        [letters[names.values[code]] for code in names.codes[rows].tolist()],
        int(part.column("stage")[rows[0]]),
        start[rows],
        part.column("duration_ns")[rows],
        microbatch[rows],
        part.column("layer")[rows],
    )


def _bubble(rank: int, passes: _Passes, low: int, high: int) -> RankBubble:
    end = passes.start + passes.length
    busy = measure(union(passes.start, end))
    return RankBubble(
        rank,
        passes.stage,
        busy,
        high - low - busy,
        int(passes.start.min()) - low,
        high - int(end.max()),
    )


def _listed(ranks: list[_Passes]) -> list[list[Pass]]:
    """The passes of every rank by chunk; chunks are numbered by their first layers."""
    layers = sorted({layer for one in ranks for layer in one.layer.tolist()})
    chunk = {layer: number for number, layer in enumerate(layers)}
    return [
        [
            (op, chunk[layer], number)
            for op, layer, number in zip(
                one.op, one.layer.tolist(), one.microbatch.tolist(), strict=True
            )
        ]
        for one in ranks
    ]


def _kinds(listed: list[list[Pass]]) -> list[tuple[float, str]]:
    """How well every kind agrees, best first."""
    ranks = len(listed)
    microbatches = 1 + max(number for own in listed for _, _, number in own)
    chunks = 1 + max(chunk for own in listed for _, chunk, _ in own)
    from meshwright.policy.pipeline import build
    from meshwright.spec.layout import ScheduleKind

    scores = []
    for kind in get_args(ScheduleKind):
        best = 0.0
        for stages in {1, 2, max(1, chunks // ranks)}:
            try:
                schedule = build(kind, ranks, microbatches, virtual_stages=stages)
            except InputError:
                continue
            best = max(best, _agreement(listed, schedule.actions))
        scores.append((best, str(kind)))
    return sorted(scores, key=lambda item: -item[0])


def _agreement(listed: list[list[Pass]], actions: "tuple[tuple[Action, ...], ...]") -> float:
    """Part of the passes that stand at the same place in both orders."""
    same = total = 0
    for own, lane in zip(listed, actions, strict=True):
        planned = [(one.op, one.chunk, one.microbatch) for one in lane]
        same += sum(a == b for a, b in zip(own, planned, strict=False))
        total += max(len(own), len(planned))
    return same / total if total else 0.0
