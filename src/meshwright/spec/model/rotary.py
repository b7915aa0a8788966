"""How a model knows the order of its tokens: rotary settings, and the positions of a window."""

from typing import Literal

import msgspec

from meshwright.spec.field_checks import FieldChecker

RotaryScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope"]


class Rotary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding and the way it is stretched to longer contexts."""

    theta: float = 10000.0
    """Base of the wavelengths."""
    fraction: float = 1.0
    """Share of each head's dimensions that turn."""
    interleaved: bool = False
    """Pairs are neighbours (GPT-J) rather than halves (Llama)."""
    scaling: RotaryScaling = "none"
    """The stretching rule."""
    factor: float = 1.0
    """How far the context is stretched."""
    original_positions: int | None = None
    """Context length before stretching."""
    low_frequency: float | None = None
    """`llama3`: wavelengths longer than context / this are stretched in full."""
    high_frequency: float | None = None
    """`llama3`: wavelengths shorter than context / this are left alone."""
    beta_fast: float | None = None
    """`yarn`: rotations above which a dimension is left alone."""
    beta_slow: float | None = None
    """`yarn`: rotations below which a dimension is interpolated in full."""
    mscale: float | None = None
    """`yarn`: correction of the attention temperature."""
    mscale_all_dim: float | None = None
    """`yarn`: the same correction when it applies to all dimensions."""
    truncate: bool = True
    """`yarn`: round the ends of the ramp to whole dimensions."""
    attention_factor: float | None = None
    """Explicit multiplier of the rotary output."""
    short_factors: tuple[float, ...] = ()
    """`longrope`: one factor per dimension below the original context."""
    long_factors: tuple[float, ...] = ()
    """`longrope`: one factor per dimension above it."""
    sections: tuple[int, ...] = ()
    """`mrope`: dimensions that follow time, height and width."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(theta=self.theta, fraction=self.fraction, factor=self.factor)
        bounds.count(original_positions=self.original_positions)
        if bounds.is_valid("fraction") and self.fraction > 1:
            bounds.add("fraction", f"{self.fraction!r} is more than the whole head", "use 1")
        bounds.raise_problems()


class AttentionTemperature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queries far into the context are scaled by 1 + scale · ln(1 + ⌊(position + 1) / floor⌋)."""

    floor: int
    """Positions per step; the first step leaves queries alone."""
    scale: float
    """Growth per natural logarithm of the step."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(floor=self.floor)
        bounds.raise_problems()


def mean_context_length(
    length: int, window: int | None = None, chunk: int | None = None, causal: bool = True
) -> float:
    """Return how many positions a token attends to, averaged over a sequence.

    Counted exactly: a causal token sees itself and those before it, a window keeps the last
    `window` of these, a chunk starts afresh every `chunk` tokens.
    """
    if not causal:
        return float(length)
    whole, rest = divmod(length, min(chunk or length, length))
    return (whole * _pairs(min(chunk or length, length), window) + _pairs(rest, window)) / length


def _pairs(length: int, window: int | None) -> int:
    """Count the pairs of a token and a position it sees in one causal stretch."""
    near = min(window or length, length)
    return near * (near + 1) // 2 + (length - near) * near
