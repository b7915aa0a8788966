"""How far a layout may be from one device, by number format and axis.

Errors are root mean squares over a tensor or a rank's part of it, relative to that of the whole
tensor of the float32 reference (`compare.relative`).

In float32 a layout only adds up in another order. `FP32_TOLERANCES` has for every axis and kind of
tensor what was found over the models and layouts of `tests/run/parallel/verify/measure.py`, times
`TOLERANCE_MARGIN`, as a number of one digit; layouts with several axes get the largest of theirs.
In 16-bit formats and fp8 one device is off already. A layout may be off by `FACTORS` (or
`FP8_FACTORS`) times what one device of that format is off for the same tensor, measured in the same
call: the largest multiple that was found for an axis, half as much again, as a whole number. No
tensor is asked to be nearer than the format's rounding, nor, behind a router of experts, than
tokens that go to another expert.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshwright.spec.layout import Layout

TensorKind = Literal["activation", "gradient", "update"]
TENSOR_KINDS: tuple[TensorKind, ...] = ("activation", "gradient", "update")

TOLERANCE_MARGIN = 4.0
"""Between the largest error that was measured and what is let through."""
TOKENS = 256
"""Of the steps that were measured. Sums over more of them are rounded more often: errors that are
independent of each other add up to the root of their number."""
FP32_TOLERANCES: dict[str, dict[TensorKind, float]] = {
    "tp": {"activation": 4e-6, "gradient": 2e-5, "update": 6e-5},
    "cp": {"activation": 3e-6, "gradient": 7e-6, "update": 7e-5},
    "pp": {"activation": 7e-7, "gradient": 6e-6, "update": 4e-5},
    "dp": {"activation": 6e-7, "gradient": 6e-6, "update": 7e-5},
    "ep": {"activation": 2e-6, "gradient": 6e-6, "update": 7e-5},
    "recompute": {"activation": 7e-7, "gradient": 6e-6, "update": 7e-5},
    "microbatches": {"activation": 7e-7, "gradient": 6e-6, "update": 7e-5},
}
FACTORS: dict[str, dict[TensorKind, float]] = {
    "tp": {"activation": 2, "gradient": 3, "update": 7},
    "cp": {"activation": 3, "gradient": 4, "update": 4},
    "pp": {"activation": 2, "gradient": 2, "update": 2},
    "dp": {"activation": 2, "gradient": 2, "update": 2},
    "ep": {"activation": 4, "gradient": 4, "update": 4},
    "recompute": {"activation": 2, "gradient": 2, "update": 2},
    "microbatches": {"activation": 2, "gradient": 3, "update": 4},
}
FP8_FACTORS: dict[str, dict[TensorKind, float]] = {
    "tp": {"activation": 2, "gradient": 3, "update": 11},
    "cp": {"activation": 2, "gradient": 3, "update": 5},
    "pp": {"activation": 2, "gradient": 2, "update": 2},
    "dp": {"activation": 2, "gradient": 2, "update": 2},
    "ep": {"activation": 2, "gradient": 2, "update": 2},
    "recompute": {"activation": 2, "gradient": 2, "update": 2},
    "microbatches": {"activation": 2, "gradient": 2, "update": 3},
}
"""The same for all recipes of fp8; the largest update is of a bias, in `fp8-tensorwise`."""
AMPLIFICATION = 2.0
"""What `step`'s AdamW makes of an error of gradients: g / (|g| + eps) with normal g and eps a tenth
of their average doubles an independent error, relative to the result (by sampling)."""
ROUNDING_ERRORS = {
    "bf16": 2.0**-9,
    "fp16": 2.0**-12,
    "fp8-tensorwise": 2.0**-5,
    "fp8-rowwise": 2.0**-5,
    "fp8-blockwise": 2.0**-5,
}
"""Half the distance of neighbouring numbers, relative to them; in fp8 (e4m3, half a distance of up
to 2⁻⁴) about its root mean square over all numbers."""


def iter_active_axes(layout: Layout) -> Iterator[str]:
    """Yield what a layout does otherwise than one device; every one runs microbatches."""
    for name in ("tp", "cp", "pp", "dp", "ep"):
        if getattr(layout, name) > 1:
            yield name
    if layout.recompute != "none":
        yield "recompute"
    yield "microbatches"


class ToleranceContext(NamedTuple):
    """What else limits depend on."""

    tokens: int = TOKENS
    """Of the step."""
    expert_rows: float | None = None
    """Tokens that an expert gets on average, for tensors that depend on where tokens are sent."""


def compute_error_limit(
    kind: TensorKind, layout: Layout, alone: float, given: ToleranceContext
) -> float:
    """Return the largest error that a tensor may have.

    `alone` is the error of one device in the layout's format.
    """
    axes = list(iter_active_axes(layout))
    if layout.precision == "fp32":
        most = max(FP32_TOLERANCES[axis][kind] for axis in axes)
        return most * math.sqrt(max(1, given.tokens / TOKENS))
    precision = layout.precision
    factors = FP8_FACTORS if precision.startswith("fp8") else FACTORS
    factor = max(factors[axis][kind] for axis in axes)
    elsewhere = compute_rerouting_error(kind, precision, given.expert_rows)
    return max(factor * max(alone, ROUNDING_ERRORS[precision]), elsewhere)


def compute_rerouting_error(kind: TensorKind, precision: str, rows: float | None) -> float:
    """Return the error where tokens go to another expert, whose rows are so many.

    Scores that are equal but for rounding send a token elsewhere, on one device as under a layout.
    An expert's sums then have terms more or less of independent ones: one in 16 bits, and as many
    as rounding is coarser in fp8.
    """
    if rows is None:
        return 0.0
    tokens = max(1.0, ROUNDING_ERRORS[precision] / ROUNDING_ERRORS["bf16"])
    return math.sqrt(tokens / rows) * (AMPLIFICATION if kind == "update" else 1)
