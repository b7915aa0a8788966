"""Places what a pass consists of in time: kernels in a row, collectives beside or between them.

A collective ends when compute goes on. As far as compute does not wait for it, it runs beside what
comes before; where that is too short, beside what follows.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from meshwright.policy.pipeline.spans import NAMES
from meshwright.predict.simulate_layers import Segment
from meshwright.timeline import Kind

LANES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert exchange",
    "dp": "data parallel",
    "host": "host memory",
}
"""The lane of each process group, and of copies between device and host."""

COMPUTE = "compute"


class Beat(NamedTuple):
    """A span inside some passes that start together; times count from their start."""

    lane: str
    kind: Kind
    name: str
    start: float
    end: float
    layer: int = -1
    group: str = ""
    collective: str = ""
    nbytes: int = -1
    member: int = 0
    """Which of the passes it belongs to."""


def merged(op: str, layers: list[list[Segment]]) -> list[list[Segment]]:
    """Return a pass as one layer, for steps with too many passes to draw each in full."""
    every = list(chain.from_iterable(layers))
    again = sum(one.seconds for one in every if one.name == "recompute")
    compute = sum(one.seconds for one in every if one.collective is None) - again
    found = [Segment("recompute", again)] if again else []
    found.append(Segment(NAMES[op], compute))
    for group, lane in LANES.items():
        some = [one for one in every if one.collective and one.collective.group == group]
        if some and some[0].collective:
            names = {one.name for one in some}
            found.append(
                Segment(
                    some[0].name if len(names) == 1 else lane,
                    sum(one.seconds for one in some),
                    collective=some[0].collective._replace(nbytes=-1),
                    exposed=sum(one.exposed for one in some),
                )
            )
    return [found]


def lay_out(passes: Sequence[list[list[Segment]]]) -> list[Beat]:
    """Place the segments of passes that start together, a layer of each in turn."""
    turns = chain.from_iterable(zip_longest(*map(_numbered, passes, range(len(passes)))))
    kernels: list[Beat] = []
    lanes: dict[str, list[Beat]] = {}
    now = 0.0
    for member, segment in chain.from_iterable(turn for turn in turns if turn):
        name, seconds, layer, collective, exposed = segment
        if collective is None:
            beat = Beat(COMPUTE, Kind.COMPUTE, name, now, now + seconds, layer, member=member)
            kernels.append(beat)
            now += seconds
            continue
        lane = LANES[collective.group]
        if exposed:
            wait = Beat(COMPUTE, Kind.WAIT, f"wait for {lane}", now, now + exposed, layer)
            kernels.append(wait._replace(member=member))
            now += exposed
        own = lanes.setdefault(lane, [])
        start = max(own[-1].end if own else 0.0, now - max(seconds, exposed))
        copies = collective.group == "host"
        own.append(
            Beat(
                lane,
                Kind.MEMORY_COPY if copies else Kind.COMMUNICATION,
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


def _numbered(layers: list[list[Segment]], member: int) -> list[list[tuple[int, Segment]]]:
    return [[(member, segment) for segment in layer] for layer in layers]


def _within(beats: list[Beat], end: float) -> list[Beat]:
    """Move collectives of a lane ahead where they would end after their pass."""
    found: list[Beat] = []
    for beat in reversed(beats):
        late = max(0.0, beat.end - end)
        end = max(0.0, beat.start - late)
        found.append(beat._replace(start=end, end=beat.end - late))
    return found[::-1]
