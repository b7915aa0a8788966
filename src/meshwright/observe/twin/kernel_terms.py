"""Which kind of work a kernel of our own trainer does, by its name.

Kernels of libraries are known by what their makers put into every name; ours have the names of
their functions in `run/kernels`. What is not known is `other`: a prediction has nothing of it.
"""

import re
from typing import Literal

import numpy as np

from meshwright.predict.terms import Term
from meshwright.timeline import Kind, Timeline

Part = Term | Literal["data", "other", "gaps"]
"""A kind of work; copies from the host; kernels nobody knows; nothing at all."""
SHOWN: tuple[Part, ...] = (
    "products", "grouped products", "attention", "norms", "activations", "rotary", "routing",
    "casts", "embedding", "loss", "optimizer", "gradient norm", "data", "other", "gaps",
)  # fmt: skip
"""The head's products have the names of all others, and are counted among them."""

_NAMES: tuple[tuple[Part, str], ...] = (
    ("attention", r"sdpa|flash|fmha|attention|dot_do_o|convert_dq|flex"),
    ("grouped products", r"rows_kernel|groups_kernel|sums_kernel|grouped"),
    ("products", r"nvjet|gemm|cutlass|splitK|cublas|wgmma|matmul|_mm_"),
    ("casts", r"amax_of|cast_tile|cast_row|cast_lines"),
    ("optimizer", r"_update_chunks"),
    ("gradient norm", r"_square_chunks|_add_up"),
    ("loss", r"_turn_row|^_turn$|^_ignore$|^_scale$"),
    ("rotary", r"rotate_tokens|norm_turn"),
    ("norms", r"^normalise$|^gradients$|_add_parts"),
    ("activations", r"^_gate$|^_ungate$"),
    (
        "routing",
        r"_copy_kernel|_sum_kernel|_spread_kernel|_weigh_kernel|topk|TopK|bincount|histogram",
    ),
    ("embedding", r"_add_equal|index_select|embedding|vectorized_gather|indexSelect"),
    ("data", r"Memcpy HtoD"),
)
_KNOWN = [(part, re.compile(pattern)) for part, pattern in _NAMES]


def part_of(name: str) -> Part:
    """Return what a kernel does; `other` where its name does not say."""
    return next((part for part, pattern in _KNOWN if pattern.search(name)), "other")


def measured_parts(timeline: Timeline, steps: int) -> dict[Part, float]:
    """Return seconds of one step by kind of work, as the device was seen to spend them.

    `gaps` is the time between the first and the last kernel in which none ran. Kernels side by side
    count in full, each where it belongs.
    """
    kinds, names = timeline.strings("kind"), timeline.strings("name")
    busy = [value in _DEVICE for value in kinds.values] + [False]
    processes = timeline.strings("process")
    on_device = [str(value).startswith("gpu") for value in processes.values] + [False]
    keep = np.array(busy)[kinds.codes] & np.array(on_device)[processes.codes]
    start, length = timeline.column("start_ns")[keep], timeline.column("duration_ns")[keep]
    codes = names.codes[keep]
    found = dict.fromkeys(SHOWN, 0.0)
    for code in np.unique(codes):
        seconds = float(length[codes == code].sum()) / 1e9
        found[part_of(str(names.values[code]))] += seconds / steps
    found["gaps"] = _idle_s(start, start + length) / steps
    return found


_DEVICE = frozenset({Kind.COMPUTE, Kind.MEMORY_COPY, Kind.COMMUNICATION})


def predicted_parts(work: dict[Term, float], gaps_s: float) -> dict[Part, float]:
    """Return a predicted step in the same words."""
    found = dict.fromkeys(SHOWN, 0.0)
    for term, seconds in work.items():
        found["products" if term == "head" else term] += seconds
    found["gaps"] = gaps_s
    return found


def _idle_s(start: "np.ndarray", end: "np.ndarray") -> float:
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    latest = np.maximum.accumulate(end[order])
    return float(np.maximum(0, start[order][1:] - latest[:-1]).sum()) / 1e9
