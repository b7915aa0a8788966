"""What ranks computed in a step on processors, as spans that analyses read.

A recorded step says what its host did: passes, gradients, the update, and when it waited inside
them. Where the host is the device as well, all of that but the waits is compute.
"""

import re
from itertools import pairwise

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.spans.intervals import Intervals, match_values, subtract, union
from meshwright.policy.pipeline.pass_spans import LANE
from meshwright.timeline import SpanKind, Timeline
from meshwright.timeline.timeline import match_kinds

AFTER = frozenset({"grad reduce", "optimizer"})
"""What a step computes when its passes are over, by the names of the trainer's spans."""

PROCESS = "cpu"


def add_compute_spans(timeline: Timeline) -> Timeline:
    """Return a measured step with a lane of compute for every rank."""
    return Timeline.concat([timeline, *map(_computed, timeline.split_by_rank())])


def _computed(part: Timeline) -> Timeline:
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    waits = match_kinds(part.string_column("kind"), [SpanKind.WAIT])
    idle = union(start[waits], end[waits])
    names = part.string_column("name")
    works = match_values(part.string_column("lane"), lambda lane: lane == LANE)
    works |= match_values(names, lambda name: name in AFTER)
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
    details = {
        "rank": part.ranks[0],
        "kind": SpanKind.COMPUTE,
        "process": PROCESS,
        "lane": "compute",
    }
    return Timeline.from_columns({**found, **details}, source=part.source, metadata=part.metadata)


_STEP = re.compile(r"step \d+")


def select_median_step(timeline: Timeline) -> Timeline:
    """Return the spans that begin in the middle step, which lasts until the next one begins.

    Steps overlap: weights may still be gathered when the next begins. So the last, which has no
    next, is not among those to choose from. Of an even number the shorter is taken. Ranks begin a
    step at slightly different times; its length is that on the first of them.
    """
    names = timeline.string_column("name")
    is_step = np.array([bool(_STEP.fullmatch(str(name))) for name in names.values] + [False])
    rank, start = timeline.column("rank"), timeline.column("start_ns")
    steps = is_step[names.codes]
    begins = {each: np.sort(start[steps & (rank == each)]) for each in timeline.ranks}
    fewest = min(map(len, begins.values()), default=0)
    if fewest < 2:
        fix = "record two steps or more"
        raise InputError([Problem("timeline", f"has {fewest} steps", fix)])
    first = begins[timeline.ranks[0]]
    lengths = [int(after - before) for before, after in pairwise(first.tolist())]
    chosen = sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]
    keep = np.zeros(timeline.num_spans, dtype=np.bool_)
    for each, starts in begins.items():
        inside = (start >= starts[chosen]) & (start < starts[chosen + 1])
        keep |= inside & (rank == each)
    found = {"step_s": repr(lengths[chosen] / 1e9), "steps": str(len(lengths))}
    return replace(
        timeline,
        spans=timeline.spans.filter(pa.array(keep)),
        metadata=timeline.metadata | found,
    )
