"""The cost models over arrays, for fitting: the same formulas as `meshwright.predict.cost`.

`fit.py` scores the shipped scalar functions, and a test holds both to each other, so a slip here
shows up there.
"""

from typing import Any

import numpy as np

from meshwright.predict.cost.gemm import LEAST_ROWS, SPLIT_K_FACTORS, SPLIT_K_MAX_WAVES, STEP
from meshwright.predict.cost.gemm_rate import TILES, UNSPLIT_TILES

Array = Any
Constants = dict[str, float]

WARM_S = 2e-3
"""Time after which a product measured again and again has warmed the chip up."""


def waves_of(waves: Array, tail: float) -> Array:
    """Count waves, the last one in part."""
    return np.maximum(1.0, waves + tail * (np.ceil(waves) - waves))


def smooth_max(a: Array, b: Array) -> Array:
    """Return the larger of two times, rounded where they meet."""
    return (a**4 + b**4) ** 0.25


def product_s(
    c: Constants,
    device: tuple[float, float, int],
    shape: tuple[Array, Array, Array],
    input_bytes: float = 2.0,
    out_bytes: float = 2.0,
    *,
    whole: bool = False,
) -> Array:
    """Return the time of products on a device of (peak, bandwidth, SMs)."""
    peak, bandwidth, sms = device
    m, n, k = shape
    short, long = np.minimum(m, n), np.maximum(m, n)
    speed = c["efficiency"] * peak / sms
    fill = c["fill_k"] * out_bytes / 2.0
    best = np.full(np.shape(m), np.inf)
    add_s = 4.0 * c["split_penalty"] * m * n / bandwidth
    least = np.maximum(LEAST_ROWS, STEP * np.ceil(short / STEP))
    for most, columns in TILES[:UNSPLIT_TILES] if whole else TILES:
        rows = np.minimum(most, least) if whole else most
        waves = np.ceil(short / rows) * np.ceil(long / columns) / sms
        penalty = 1.0 + c["tile_penalty"] * (128 / most + 128 / columns - 1.5)
        per_k = 2.0 * rows * columns * penalty / speed
        best = np.minimum(best, waves_of(waves, c["tail"]) * per_k * (k + fill))
        if whole:
            continue
        few = waves < SPLIT_K_MAX_WAVES
        for split in SPLIT_K_FACTORS:
            time_s = waves_of(waves * split, c["tail"]) * per_k * (k / split + fill)
            best = np.where(few, np.minimum(best, time_s + split * add_s), best)
    moved = input_bytes * k * (m + n) + out_bytes * m * n
    return c["launch_s"] + smooth_max(best, moved / (c["bandwidth"] * bandwidth))


def warmed_s(time_s: Array, droop: float) -> Array:
    """Return what a benchmark loop sees: long products warm the chip into its power limit."""
    return time_s * (1.0 + droop * (1.0 - np.exp(-time_s / WARM_S)))


def attention_s(
    c: Constants, device: tuple[float, float, int], rows: dict[str, Array], backward: bool = False
) -> Array:
    """Return the time of causal or unmasked attention, `window` 0 meaning none."""
    peak, bandwidth, sms = device
    seq, heads = rows["seq"], rows["heads"]
    pad = c["pad_dims"]
    head, value = (np.ceil(rows[name] / pad) * pad for name in ("head_dim", "value_dim"))
    dims = 3 * head + 2 * value if backward else head + value
    work = np.sqrt(dims**2 + c["softmax_dims"] ** 2)
    per_key_s = 2.0 * 128 * work / (c["efficiency"] * peak / sms)
    waves = rows["batch"] * heads * np.ceil(seq / 128) / sms
    window = rows["window"]
    narrow = (window > 0) & (window < seq)
    seen = np.where(narrow, window - window**2 / (2.0 * seq), seq / 2.0)
    mean = np.minimum(seq, seen + np.where(narrow, 256.0, 64.0))
    longest_s = (np.where(narrow, np.minimum(window + 256, seq), seq) + c["fill_keys"]) * per_key_s
    total_s = waves * (mean + c["fill_keys"]) * per_key_s
    masked_s = np.maximum(total_s + c["tail"] * longest_s, longest_s)
    plain_s = waves_of(waves, c["wave"]) * (seq + c["fill_keys"]) * per_key_s
    compute_s = np.where(rows["causal"], masked_s, plain_s)
    sides = rows["batch"] * seq * (heads + rows["kv_heads"])
    moved = (2.0 if backward else 1.0) * 2.0 * sides * (rows["head_dim"] + rows["value_dim"])
    return c["launch_s"] + smooth_max(compute_s, moved / (0.8 * bandwidth))
