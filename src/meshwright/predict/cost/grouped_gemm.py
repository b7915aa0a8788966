"""Time of the experts' products: one grouped kernel, many small matrices of one shape.

A grouped kernel keeps one tile shape for all its groups and does not split k, so the loss from
few tokens per expert is that of a half-filled tile. Who sends how many tokens where is the
caller's matter: pass the tokens of the busiest rank's average expert.
"""

from functools import lru_cache
from math import ceil

from meshwright.predict.cost.device_costs import DeviceCosts
from meshwright.predict.cost.gemm import LinearPart, alignment_efficiency, count_waves, smooth_max

ROWS, COLUMNS = 128, 256
"""The tile of a grouped kernel: the largest of a dense one's."""


@lru_cache(maxsize=1 << 16)
def grouped_gemm_s(
    device: DeviceCosts,
    experts: int,
    tokens: float,
    out_features: int,
    in_features: int,
    *,
    precision: str = "bf16",
    part: LinearPart = "forward",
    out_bytes: float | None = None,
) -> float:
    """Return the seconds of `experts` products, each of `tokens` rows with its own weights."""
    if experts <= 0 or tokens <= 0:
        return 0.0
    rate = device.get_grouped_gemm_rate(precision)
    m, n, k = float(tokens), out_features, float(in_features)
    contiguous = in_features
    speed = rate.flops_per_sm
    stored = 2.0
    if part == "input_gradient":
        n, k = in_features, float(out_features)
        contiguous = out_features
    elif part == "weight_gradient":
        m, n, k = float(out_features), in_features, float(tokens)
        contiguous = out_features
        stored = rate.accumulate_bytes
    if part != "forward":
        speed *= rate.weight_ratio if part == "weight_gradient" else rate.gradient_ratio
    if out_bytes is not None:
        stored = out_bytes
    speed *= alignment_efficiency(rate.elements_per_word, n, contiguous)
    waves = experts * ceil(m / ROWS) * ceil(n / COLUMNS) / device.sms
    depth = k + rate.fill_k * stored / 2.0
    compute_s = count_waves(waves, rate.tail) * 2.0 * ROWS * COLUMNS * depth / speed
    moved = experts * (rate.input_bytes * k * (m + n) + stored * m * n)
    time_s = rate.launch_s + smooth_max(compute_s, moved / rate.bytes_per_s)
    if rate.correction is not None:
        time_s *= rate.correction.factor(part, experts, m, n, k)
    return time_s


def grouped_gemm_bound_s(
    device: DeviceCosts, flops: float, *, precision: str, gradient: bool
) -> float:
    """Return the least that grouped products with so many FLOPs take, whatever their shapes."""
    rate = device.get_grouped_gemm_rate(precision)
    ratio = max(rate.gradient_ratio, rate.weight_ratio) if gradient else 1.0
    speed = rate.flops_per_sm * device.sms * ratio
    return flops / speed * (rate.correction.min_factor if rate.correction is not None else 1.0)
