"""Time of one matrix product: a roofline with tiles, waves, split k and awkward sizes.

    t = launch + (t_compute⁴ + t_memory⁴)^¼
    t_compute = waves × 2 × rows × columns × (k / split + fill) / (efficiency × peak of one SM)

The kernel library tries tile shapes and splits of k; here the fastest of a few is taken. Layers,
casts and communication are not known here, nor the slow-down of a chip that is hot.
"""

from functools import lru_cache
from math import ceil
from typing import Literal

from meshwright.predict.cost.device_costs import DeviceCosts
from meshwright.predict.cost.gemm_rate import GemmRate

GemmLayout = Literal["TN", "NN", "NT"]
"""Forward, input gradient, and weight gradient that is added into an fp32 buffer."""
LinearPart = Literal["forward", "input_gradient", "weight_gradient"]

PART_BY_LAYOUT: dict[GemmLayout, LinearPart] = {
    "TN": "forward",
    "NN": "input_gradient",
    "NT": "weight_gradient",
}
"""Which part of a linear layer has which layout."""
SPLIT_K_FACTORS = (2, 3, 4)
"""Ways to split k that are tried where there are few tiles."""
SPLIT_K_MAX_WAVES = 1.0
"""Libraries split k where the tiles do not fill the chip once."""
STEP, LEAST_ROWS = 16, 64
"""Tiles that k is not split for are as narrow as there are rows, by so many; an SM fetches what it
multiplies with no faster than it computes so many rows (64 bytes a cycle: 4,096 × 128 in 5 µs)."""
HALF_ALIGNED_EFFICIENCY = 0.33
"""Share of the speed left where rows are not a multiple of 16 bytes (H200, bf16, measured)."""
UNALIGNED_EFFICIENCY = 0.15
"""The same where they are not even a multiple of 4 bytes."""


@lru_cache(maxsize=1 << 16)
def gemm_s(
    device: DeviceCosts,
    m: int,
    n: int,
    k: int,
    precision: str = "bf16",
    *,
    layout: GemmLayout = "TN",
    batch: int = 1,
    out_bytes: float | None = None,
    weight_bytes: float | None = None,
) -> float:
    """Return the seconds of `batch` products m × k by k × n, each with its own result.

    m, n and k are those of the very product: for a weight gradient k is the number of tokens.
    `out_bytes` is what storing one element of the result moves; by default 2, or what adding into
    an fp32 buffer moves for layout NT. `weight_bytes` is for weights stored in fewer bytes than
    they are multiplied in.
    """
    if m <= 0 or n <= 0 or k <= 0 or batch <= 0:
        return 0.0
    rate = device.get_gemm_rate(precision)
    if out_bytes is None:
        out_bytes = rate.accumulate_bytes if layout == "NT" else 2.0
    speed = rate.flops_per_sm * alignment_efficiency(
        rate.elements_per_word, n, m if layout == "NT" else k
    )
    if layout != "TN":
        speed *= rate.weight_ratio if layout == "NT" else rate.gradient_ratio
    fill = rate.fill_k * out_bytes / 2.0
    compute_s = _tile_flops(rate, (m, n, k, batch), device.sms, fill) / speed
    stored = rate.input_bytes if weight_bytes is None else weight_bytes
    moved = batch * (k * (rate.input_bytes * m + stored * n) + out_bytes * m * n)
    time_s = rate.launch_s + smooth_max(compute_s, moved / rate.bytes_per_s)
    if rate.correction is not None and batch == 1:
        time_s *= rate.correction.factor(PART_BY_LAYOUT[layout], m, n, k)
    return time_s


def linear_s(
    device: DeviceCosts,
    tokens: int,
    out_features: int,
    in_features: int,
    precision: str = "bf16",
    *,
    part: LinearPart = "forward",
) -> float:
    """Return the seconds of one product of a linear layer, named by its part of the step."""
    if part == "forward":
        return gemm_s(device, tokens, out_features, in_features, precision)
    if part == "input_gradient":
        return gemm_s(device, tokens, in_features, out_features, precision, layout="NN")
    return gemm_s(device, out_features, in_features, tokens, precision, layout="NT")


def _tile_flops(rate: GemmRate, shape: tuple[int, int, int, int], sms: int, fill: float) -> float:
    """Return the FLOPs that the busiest SM works through with the best tile and split."""
    m, n, k, batch = shape
    short, long = (m, n) if m <= n else (n, m)
    add = rate.split_flops_per_element * batch * m * n
    best = float("inf")
    least = 0 if rate.allows_split_k else max(LEAST_ROWS, STEP * ceil(short / STEP))
    for (most, columns), tile_efficiency in zip(rate.tiles, rate.tile_efficiency, strict=True):
        rows = min(most, least) or most
        waves = batch * ceil(short / rows) * ceil(long / columns) / sms
        per_k = 2.0 * rows * columns / tile_efficiency
        best = min(best, count_waves(waves, rate.tail) * per_k * (k + fill))
        if rate.allows_split_k and waves < SPLIT_K_MAX_WAVES:
            for split in SPLIT_K_FACTORS:
                work = count_waves(waves * split, rate.tail) * per_k * (k / split + fill)
                best = min(best, work + split * add)
    return best


def count_waves(waves: float, tail: float) -> float:
    """Return how many waves the tiles take, the last one counted in part."""
    if waves <= 1.0:
        return 1.0
    return waves + tail * (ceil(waves) - waves)


def alignment_efficiency(word: int, n: int, depth: int) -> float:
    """Return the share of the speed left by sizes that do not fill 16-byte words.

    Both are sizes along which memory is contiguous: the result's rows, and an operand's, of which
    `word` elements fill 16 bytes.
    """
    if n % 8 == 0 and depth % word == 0:
        return 1.0
    return (
        HALF_ALIGNED_EFFICIENCY if n % 2 == 0 and depth % (word // 4) == 0 else UNALIGNED_EFFICIENCY
    )


def smooth_max(a: float, b: float) -> float:
    """Return the larger of two overlapped times, rounded up where they meet."""
    high, low = (a, b) if a >= b else (b, a)
    ratio = low / high
    ratio *= ratio
    return high * float((1.0 + ratio * ratio) ** 0.25)
