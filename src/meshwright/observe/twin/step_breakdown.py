"""A step by kind of work, as it was measured and as it was predicted, in the same words.

What is not known is `other`: a prediction has nothing of it.
"""

import numpy as np

from meshwright.observe.analyze.device_time.kernel_classes import (
    StepTimeKind,
    classify_trainer_kernel,
)
from meshwright.observe.analyze.spans.intervals import Ints, find_gaps, measure_total_ns, union
from meshwright.predict.step.kernel_kinds import KernelKind
from meshwright.timeline import SpanKind, Timeline

SHOWN_KINDS: tuple[StepTimeKind, ...] = (
    "gemm", "grouped_gemm", "attention", "norms", "activations", "rotary", "routing",
    "casts", "embedding", "loss", "optimizer", "gradient_norm", "data", "other", "idle",
)  # fmt: skip
"""The head's products have the names of all others, and are counted among them."""


def measure_step_breakdown(timeline: Timeline, steps: int) -> dict[StepTimeKind, float]:
    """Return seconds of one step by kind of work, as the device was seen to spend them.

    `idle` is the time between the first and the last kernel in which none ran. Kernels side by side
    count in full, each where it belongs.
    """
    kinds, names = timeline.string_column("kind"), timeline.string_column("name")
    busy = [value in _DEVICE for value in kinds.values] + [False]
    processes = timeline.string_column("process")
    on_device = [str(value).startswith("gpu") for value in processes.values] + [False]
    keep = np.array(busy)[kinds.codes] & np.array(on_device)[processes.codes]
    start, length = timeline.column("start_ns")[keep], timeline.column("duration_ns")[keep]
    codes = names.codes[keep]
    found = dict.fromkeys(SHOWN_KINDS, 0.0)
    for code in np.unique(codes):
        seconds = float(length[codes == code].sum()) / 1e9
        found[classify_trainer_kernel(str(names.values[code]))] += seconds / steps
    found["idle"] = _measure_idle_s(start, start + length) / steps
    return found


_DEVICE = frozenset({SpanKind.COMPUTE, SpanKind.MEMORY_COPY, SpanKind.COMMUNICATION})


def predict_step_breakdown(
    work: dict[KernelKind, float], gaps_s: float
) -> dict[StepTimeKind, float]:
    """Return a predicted step in the same words."""
    found = dict.fromkeys(SHOWN_KINDS, 0.0)
    for term, seconds in work.items():
        found["gemm" if term == "head" else term] += seconds
    found["idle"] = gaps_s
    return found


def _measure_idle_s(start: Ints, end: Ints) -> float:
    """Return the time between the first start and the last end in which nothing ran."""
    busy = union(start, end)
    if not busy.start.size:
        return 0.0
    return measure_total_ns(find_gaps(busy, (int(busy.start[0]), int(busy.end[-1])))) / 1e9
