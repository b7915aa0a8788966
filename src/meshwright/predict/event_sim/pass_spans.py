"""Places what a pass consists of in time: kernels in a row, collectives beside or between them.

A collective ends when compute goes on. As far as compute does not wait for it, it runs beside what
comes before; where that is too short, beside what follows.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from meshwright.policy.pipeline.pass_spans import PASS_NAMES
from meshwright.predict.event_sim.pass_layers import LayerSegment
from meshwright.timeline import SpanKind

LANE_NAMES = {
    "tp": "comm tp",
    "cp": "comm cp",
    "ep": "comm ep",
    "dp": "comm dp",
    "host": "host memory",
}
"""The lane of each process group, and of copies between device and host."""

WAIT_NAMES = {group: f"wait for {lane.removeprefix('comm ')}" for group, lane in LANE_NAMES.items()}
"""The span of a wait for a process group, or for copies between device and host."""

COMPUTE = "compute"


class PassSpan(NamedTuple):
    """A span inside some passes that start together; times count from their start."""

    lane: str
    kind: SpanKind
    name: str
    start: float
    end: float
    layer: int = -1
    group: str = ""
    collective: str = ""
    nbytes: int = -1
    member: int = 0
    """Which of the passes it belongs to."""


def merge_layers(op: str, layers: list[list[LayerSegment]]) -> list[list[LayerSegment]]:
    """Return a pass as one layer, for steps with too many passes to draw each in full."""
    every = list(chain.from_iterable(layers))
    again = sum(one.seconds for one in every if one.name == "recompute")
    compute = sum(one.seconds for one in every if one.collective is None) - again
    found = [LayerSegment("recompute", again)] if again else []
    found.append(LayerSegment(PASS_NAMES[op], compute))
    for group, lane in LANE_NAMES.items():
        some = [one for one in every if one.collective and one.collective.group == group]
        if some and some[0].collective:
            names = {one.name for one in some}
            found.append(
                LayerSegment(
                    some[0].name if len(names) == 1 else lane,
                    sum(one.seconds for one in some),
                    collective=some[0].collective._replace(nbytes=-1),
                    exposed=sum(one.exposed for one in some),
                )
            )
    return [found]


def build_pass_spans(passes: Sequence[list[list[LayerSegment]]]) -> list[PassSpan]:
    """Place the segments of passes that start together, a layer of each in turn."""
    turns = chain.from_iterable(zip_longest(*map(_numbered, passes, range(len(passes)))))
    kernels: list[PassSpan] = []
    lanes: dict[str, list[PassSpan]] = {}
    now = 0.0
    for member, segment in chain.from_iterable(turn for turn in turns if turn):
        name, seconds, layer, collective, exposed = segment
        if collective is None:
            beat = PassSpan(
                COMPUTE, SpanKind.COMPUTE, name, now, now + seconds, layer, member=member
            )
            kernels.append(beat)
            now += seconds
            continue
        lane = LANE_NAMES[collective.group]
        if exposed:
            wait = PassSpan(
                COMPUTE, SpanKind.WAIT, WAIT_NAMES[collective.group], now, now + exposed, layer
            )
            kernels.append(wait._replace(member=member))
            now += exposed
        own = lanes.setdefault(lane, [])
        start = max(own[-1].end if own else 0.0, now - max(seconds, exposed))
        copies = collective.group == "host"
        own.append(
            PassSpan(
                lane,
                SpanKind.MEMORY_COPY if copies else SpanKind.COMMUNICATION,
                name,
                start,
                start + max(seconds, exposed),
                layer,
                "" if copies else collective.group,
                "" if copies else collective.name,
                collective.nbytes,
                member,
            )
        )
    return [*kernels, *chain.from_iterable(_within(own, now) for own in lanes.values())]


def _numbered(
    layers: list[list[LayerSegment]], member: int
) -> list[list[tuple[int, LayerSegment]]]:
    return [[(member, segment) for segment in layer] for layer in layers]


def _within(beats: list[PassSpan], end: float) -> list[PassSpan]:
    """Move collectives of a lane ahead where they would end after their pass."""
    found: list[PassSpan] = []
    for beat in reversed(beats):
        late = max(0.0, beat.end - end)
        end = max(0.0, beat.start - late)
        found.append(beat._replace(start=end, end=beat.end - late))
    return found[::-1]
