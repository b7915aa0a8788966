"""What ranks computed in a step on processors, as spans that analyses read.

A recorded step says what its host did: passes, gradients, the update, and when it waited inside
them. Where the host is the device as well, all of that but the waits is compute.
"""

import numpy as np

from meshwright.observe.analyze.spans import Intervals, subtract, union, where
from meshwright.policy.pipeline.spans import LANE
from meshwright.timeline import Kind, Timeline
from meshwright.timeline.timeline import has_kind

AFTER = frozenset({"gradients", "optimizer"})
"""What a step computes when its passes are over, by the names of the trainer's spans."""
PROCESS = "cpu"


def with_compute(timeline: Timeline) -> Timeline:
    """Return a measured step with a lane of compute for every rank."""
    return Timeline.concat([timeline, *map(_computed, timeline.by_rank())])


def _computed(part: Timeline) -> Timeline:
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    waits = has_kind(part.strings("kind"), [Kind.WAIT])
    idle = union(start[waits], end[waits])
    names = part.strings("name")
    works = where(part.strings("lane"), lambda lane: lane == LANE)
    works |= where(names, lambda name: name in AFTER)
    stage, microbatch = part.column("stage"), part.column("microbatch")
    found: dict[str, list[object]] = {
        each: [] for each in ("name", "start_ns", "duration_ns", "stage", "microbatch")
    }
    for row in np.flatnonzero(works).tolist():
        own = Intervals(start[row : row + 1], end[row : row + 1])
        for first, last in zip(*subtract(own, idle), strict=True):
            values = (names.values[names.codes[row]], first, last - first, stage[row])
            for name, value in zip(found, (*values, microbatch[row]), strict=True):
                found[name].append(value)
    details = {"rank": part.ranks[0], "kind": Kind.COMPUTE, "process": PROCESS, "lane": "compute"}
    return Timeline.from_columns({**found, **details}, source=part.source, metadata=part.metadata)
