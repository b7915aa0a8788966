"""One step out of a recorded run: the middle one by its length."""

import re
from itertools import pairwise

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.timeline import Timeline

_STEP = re.compile(r"step \d+")


def middle_step(timeline: Timeline) -> Timeline:
    """Return the spans that begin in the middle step, which lasts until the next one begins.

    Steps overlap: weights may still be gathered when the next begins. So the last, which has no
    next, is not among those to choose from. Of an even number the shorter is taken. Ranks begin a
    step at slightly different times; its length is that on the first of them.
    """
    names = timeline.strings("name")
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
