"""The constants of the operator cost models, one struct per kind of work, and `Calibration`.

Every number is physical: a share of a peak, a time, a length that some overhead is worth. The
default values lie in `devices.toml`; a `Calibration` measured on a device replaces them curve by
curve. Nothing here computes a time.
"""

from math import isfinite
from typing import Literal, get_args

import msgspec

from meshwright.errors import Problem
from meshwright.spec.field_checks import FieldChecker, check_number, raise_problems

PassDirection = Literal["forward", "backward"]

AttentionKernel = Literal["native", "flash2"]

ResidualFamily = Literal["products", "grouped", "attention"]

MemoryOp = Literal[
    "copy",
    "residual",
    "norm",
    "norm_backward",
    "activation",
    "activation_backward",
    "rotary",
    "softmax",
    "cross_entropy",
    "cross_entropy_backward",
    "loss_in_place",
    "permute",
    "unpermute",
    "quantise",
    "cast",
    "accumulate",
    "optimizer",
    "gradient_norm",
]

MEMORY_OPS: tuple[MemoryOp, ...] = get_args(MemoryOp)


class GemmCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast matrix products of one precision run on a device."""

    precision: str
    """Precision of the inputs, as a `Layout` names it."""
    efficiency: float
    """Share of the dense peak reached inside a full tile, with the chip cool."""
    bandwidth: float
    """Share of the memory bandwidth that operands and result move at."""
    launch_s: float
    """Time one product takes however small it is, the host not counted."""
    fill_k: float
    """Start and end of a tile with a 2-byte result, as extra elements of k."""
    tail: float
    """How far the last wave of tiles counts as full: 0 spreads it evenly, 1 rounds it up."""
    tile_penalty: float
    """Loss of efficiency as tiles shrink: 1 / (1 + penalty × (128/rows + 128/columns − 1.5))."""
    split_penalty: float
    """Cost of adding up a k split over several tiles, in passes over an fp32 result."""
    accumulate_bytes: float = 8.0
    """What adding into an fp32 gradient moves per element, in bytes that are not hidden."""
    gradient_ratio: float = 1.0
    """Efficiency of gradient products over forward ones, where they need wider accumulation."""
    weight_ratio: float = 1.0
    """Efficiency of weight gradients over input gradients: their operands lie otherwise, and where
    scales are of blocks, both have blocks that are lines."""
    whole: bool = False
    """Whether k is never split, whose tiles are as narrow as there are rows: scales by row."""
    source: str = ""
    """Where the constants come from."""
    error: float | None = None
    """Mean absolute relative error on rows that were not fitted."""
    bias: float | None = None
    """Mean signed relative error on the same rows."""

    def __post_init__(self) -> None:
        raise_problems(
            _shares(efficiency=self.efficiency, bandwidth=self.bandwidth),
            _shares(gradient_ratio=self.gradient_ratio),
            check_number("weight_ratio", self.weight_ratio, 0.05, 2.0),
            _shares(0.0, tail=self.tail),
            _not_negative(
                launch_s=self.launch_s,
                fill_k=self.fill_k,
                tile_penalty=self.tile_penalty,
                split_penalty=self.split_penalty,
                accumulate_bytes=self.accumulate_bytes,
            ),
        )


class AttentionCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast flash-style attention runs in one direction, by one generation of kernels."""

    kernel: AttentionKernel
    """`native`: the best kernel made for the device; `flash2`: FlashAttention-2's."""
    part: PassDirection
    """Forward or backward."""
    efficiency: float
    """Share of the dense bf16 peak that the two (backward: five) products reach."""
    softmax_dims: float
    """Softmax work per score, as if it were that many more head dimensions."""
    fill_keys: float
    """Start and end of a block of 128 queries, as extra keys."""
    tail: float
    """Share of the longest block's time that is left over when causal blocks run out."""
    wave: float
    """How far the last wave counts as full when all blocks are equal (no mask)."""
    launch_s: float
    """Time one call takes however small it is."""
    pad_dims: int = 32
    """Head dimensions are rounded up to a multiple of this."""
    source: str = ""
    """Where the constants come from."""
    error: float | None = None
    """Mean absolute relative error on rows that were not fitted."""
    bias: float | None = None
    """Mean signed relative error on the same rows."""

    def __post_init__(self) -> None:
        raise_problems(
            _shares(efficiency=self.efficiency),
            _shares(0.0, tail=self.tail, wave=self.wave),
            _not_negative(
                softmax_dims=self.softmax_dims, fill_keys=self.fill_keys, launch_s=self.launch_s
            ),
        )


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What share of the memory bandwidth one class of elementwise work reaches."""

    op: MemoryOp
    """Class of work."""
    efficiency: float
    """Bytes that must move, over the time and the peak bandwidth."""
    source: str = ""
    """Where the figure comes from."""

    def __post_init__(self) -> None:
        raise_problems(
            check_number("efficiency", self.efficiency, 1e-6, max_bandwidth_share(self.op))
        )


def max_bandwidth_share(op: MemoryOp) -> float:
    """Return the largest share of the bandwidth that a class of work can seem to have.

    Permutations are counted as if each copy of a token were read from memory; a kernel that reads a
    token once for all its copies moves hardly more than half of that.
    """
    return 2.0 if op in ("permute", "unpermute") else 1.0


class LaunchCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kernel costs besides its work."""

    kernel_s: float
    """Start and end of an elementwise kernel on the GPU."""
    host_s: float
    """Time of the host to launch one kernel, without a CUDA graph."""
    graph_s: float
    """Time of the host to launch a whole CUDA graph."""
    layer_s: float | None = None
    """Time of the host for one layer's forward pass, in the software that was measured."""
    layer_backward_s: float | None = None
    experts_s: float | None = None
    """The same of a layer of experts."""
    experts_backward_s: float | None = None
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        layers = {
            name: value
            for name in ("layer_s", "layer_backward_s", "experts_s", "experts_backward_s")
            if (value := getattr(self, name)) is not None
        }
        figures = {"kernel_s": self.kernel_s, "host_s": self.host_s, "graph_s": self.graph_s}
        raise_problems(_not_negative(**figures, **layers))


class LinkCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What copies of pinned memory between a GPU and its host reach."""

    share: float
    """Share of the link's wire speed, one way."""
    crossing: float
    """How much of the smaller direction's time both add to the larger one's when copies run both
    ways at once."""
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        raise_problems(_shares(share=self.share), _shares(0.0, crossing=self.crossing))


class CurveResiduals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a curve leaves unexplained at measured shapes, and so near them.

    Logarithms of measured over predicted time, smoothed and interpolated: see
    `residual_correction`.
    """

    family: ResidualFamily
    """Which kind of work."""
    name: str
    """Whose curve: a precision, or a direction of attention."""
    reach: float
    """Over how many doublings of a size a correction fades."""
    likeness: float
    """How far a correction of one kind of call holds for another, from 0 to 1."""
    points: tuple[str, ...]
    """The measured shapes: of each the kind, the sizes and the weight."""

    def __post_init__(self) -> None:
        raise_problems(
            _shares(0.0, likeness=self.likeness),
            check_number("reach", self.reach, 0.01, 100.0),
            [problem for point in self.points for problem in _unreadable(point)],
        )

    def parse_points(
        self,
    ) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...], tuple[float, ...]]:
        """Return kinds, sizes and weights of the points."""
        words = [point.split() for point in self.points]
        return (
            tuple(each[0] for each in words),
            tuple(tuple(map(float, each[1:-1])) for each in words),
            tuple(float(each[-1]) for each in words),
        )


class MeasuredPeaks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What shares are shares of, for a device that no catalog describes: the best seen there.

    The fields are those of a `Gpu`, whose place they take.
    """

    memory_bytes_per_s: float
    sms: int = 1
    fp32_flops: float | None = None
    tf32_flops: float | None = None
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    fp8_flops: float | None = None

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(sms=self.sms)
        bounds.positive(
            **{name: value for name, value in self.known_peaks.items() if name != "sms"}
        )
        bounds.raise_problems()

    @property
    def known_peaks(self) -> dict[str, float]:
        """The figures there are, by field."""
        figures = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in figures.items() if value is not None}


def _shares(least: float = 1e-6, **values: float) -> list[Problem]:
    return [
        problem
        for name, value in values.items()
        for problem in check_number(name, value, least, 1.0)
    ]


def _not_negative(**values: float) -> list[Problem]:
    bounds = FieldChecker()
    bounds.not_negative(**values)
    return bounds.problems


def _unreadable(point: str) -> list[Problem]:
    """Say what is wrong with a measured shape."""
    _, *numbers = point.split() or [""]
    try:
        *sizes, weight = map(float, numbers)
        sound = bool(sizes) and min(sizes) > 0 and isfinite(sum(sizes) + weight)
    except ValueError:
        sound = False
    fix = "write a kind, sizes and a weight, like `forward 4096 1024 640 0.02`"
    return [] if sound else [Problem("points", f"{point!r} is no measured shape", fix)]
