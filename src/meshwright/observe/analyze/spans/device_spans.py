"""`find_device_spans`: compute, communication and copy spans of one rank as `DeviceSpans`."""

import numpy as np

from meshwright.observe.analyze.spans.intervals import DeviceSpans, match_values
from meshwright.timeline.memo import memoize
from meshwright.timeline.schema import SpanKind
from meshwright.timeline.timeline import Timeline, match_kinds

DEVICE_KINDS = (SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.MEMORY_COPY)
"""What a device does when it works; the place in this tuple is the code in `DeviceSpans.kind`."""


@memoize
def find_device_spans(part: Timeline) -> DeviceSpans:
    """The device work of one rank.

    That is compute, communication and copies on processes called `gpu …`; where a rank has none
    (it ran on CPUs), the same kinds on any process.
    """
    start, duration = part.column("start_ns"), part.column("duration_ns")
    process, lane = part.string_column("process"), part.string_column("lane")
    names, kinds = part.string_column("name"), part.string_column("kind")
    works = match_kinds(kinds, DEVICE_KINDS)
    on_gpu = works & match_values(process, lambda value: value.startswith("gpu"))
    row = np.flatnonzero(on_gpu if on_gpu.any() else works)
    end = start[row] + duration[row]
    row = row[np.lexsort((end, start[row]))]
    codes = {kind.value: code for code, kind in enumerate(DEVICE_KINDS)}
    code_of = np.array([codes.get(value, -1) for value in kinds.values] or [-1], dtype=np.int8)
    both = process.codes[row].astype(np.int64) * len(lane.values) + lane.codes[row]
    used = np.flatnonzero(np.bincount(both)) if both.size else both
    number = np.zeros(int(used[-1]) + 1 if used.size else 0, dtype=np.int64)
    number[used] = np.arange(used.size)
    return DeviceSpans(
        row=row,
        start=start[row],
        end=start[row] + duration[row],
        kind=code_of[kinds.codes[row]],
        lane=number[both],
        name=names.codes[row],
        flow=part.column("flow_in")[row],
        lanes=tuple(
            f"{process.values[code // len(lane.values)]} {lane.values[code % len(lane.values)]}"
            for code in used.tolist()
        ),
        names=names.values,
    )
