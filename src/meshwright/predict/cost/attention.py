"""Time of attention: flash-style kernels by shape and mask, and the unfused way before them.

    t = launch + (t_compute⁴ + t_memory⁴)^¼

A block of 128 queries walks over its keys; blocks are spread over the SMs. Per query and key the
products cost 2 × (head + value dimensions), five such products backward instead of two, and the
softmax counts as further dimensions. A causal mask leaves blocks of unequal length, whose last
one sticks out. Rotary embeddings, projections and the exchange of keys between ranks are not here.
"""

from functools import lru_cache
from math import ceil, sqrt
from typing import Literal

from meshwright.predict.cost.curves import AttentionCurve, AttentionKernel, PassDirection
from meshwright.predict.cost.device_costs import DeviceCosts
from meshwright.predict.cost.gemm import count_waves, gemm_s, smooth_max
from meshwright.predict.cost.memory_bound import memory_s

AttentionMask = Literal["causal", "full"]

QUERY_BLOCK = 128
"""Queries that one thread block handles."""
WIDE_HEAD_DIM = 128
"""Heads beyond this many dimensions run on kernels of their own."""
FLASH_BANDWIDTH = 0.8
"""Share of the memory bandwidth at which queries, keys and values stream."""


@lru_cache(maxsize=1 << 16)
def attention_s(
    device: DeviceCosts,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq: int,
    kv_seq: int | None = None,
    value_dim: int | None = None,
    mask: AttentionMask = "causal",
    window: int | None = None,
    part: PassDirection = "forward",
    kernel: AttentionKernel = "native",
) -> float:
    """Return the seconds of one flash-style attention call on bf16 or fp16 inputs.

    Under a causal mask the queries are the last `seq` of `kv_seq` positions. `window` counts the
    keys that a query sees under a sliding window. For MLA give the head dimensions as expanded,
    such as 192 with a `value_dim` of 128.
    """
    if batch <= 0 or heads <= 0 or seq <= 0:
        return 0.0
    keys = kv_seq or seq
    values = value_dim or head_dim
    curve = device.get_attention_curve(kernel, part)
    compute_s = _compute_s(
        device,
        curve,
        blocks=batch * heads * ceil(seq / QUERY_BLOCK),
        dims=_dims(curve, head_dim, values),
        mean=_mean_keys(seq, keys, mask, window),
        longest=float(keys if window is None else min(keys, window + 2 * QUERY_BLOCK)),
        equal=mask == "full",
    )
    # Backward reads q, k, v, o and do and writes dq, dk and dv.
    times = 2.0 if part == "backward" else 1.0
    moved = times * 2.0 * batch * (seq * heads + keys * kv_heads) * (head_dim + values)
    time_s = curve.launch_s + smooth_max(compute_s, moved / (FLASH_BANDWIDTH * device.bytes_per_s))
    correction = device.attention_corrections.get(part) if curve.kernel == "native" else None
    if correction is not None:
        kind = get_attention_kind(mask, head_dim, windowed=window is not None and window < keys)
        time_s *= correction.factor(kind, batch * heads, seq, keys, head_dim, values)
    return time_s


def get_attention_kind(mask: AttentionMask, head_dim: int, *, windowed: bool) -> str:
    """Name calls that corrections are shared between: wide heads have kernels of their own."""
    return ("window" if windowed else mask) + ("-wide" if head_dim > WIDE_HEAD_DIM else "")


def attention_flops(
    *,
    batch: int,
    heads: int,
    head_dim: int,
    seq: int,
    kv_seq: int | None = None,
    value_dim: int | None = None,
    mask: AttentionMask = "causal",
    window: int | None = None,
    part: PassDirection = "forward",
) -> float:
    """Return the useful FLOPs of the call: masked scores are not counted, recomputed ones are."""
    keys = kv_seq or seq
    values = value_dim or head_dim
    dims = 3 * head_dim + 2 * values if part == "backward" else head_dim + values
    seen = _seen_keys(seq, keys, mask, window)
    return 2.0 * batch * heads * seq * seen * dims


def unfused_attention_s(
    device: DeviceCosts,
    *,
    batch: int,
    heads: int,
    head_dim: int,
    seq: int,
    kv_seq: int | None = None,
    dropout: float = 0.0,
    part: PassDirection = "forward",
    precision: str = "bf16",
) -> float:
    """Return the seconds of attention as three steps that store the whole score matrix.

    Products for scores and context, and one fused kernel for scale, mask and softmax between
    them, as Megatron-LM had before flash kernels; dropout adds a pass that keeps a mask.
    """
    keys = kv_seq or seq
    both = batch * heads
    scores = both * seq * keys * 2.0
    if part == "forward":
        products = gemm_s(device, seq, keys, head_dim, precision, batch=both) + gemm_s(
            device, seq, head_dim, keys, precision, layout="NN", batch=both
        )
        passes = 2.0 + (2.5 if dropout else 0.0)
    else:
        # d-probabilities, d-values, d-queries and d-keys; softmax reads two and writes one.
        wide = gemm_s(device, seq, keys, head_dim, precision, batch=both)
        narrow = gemm_s(
            device, seq, head_dim, keys, precision, layout="NT", batch=both, out_bytes=2.0
        )
        products = wide + 3.0 * narrow
        passes = 3.0 + (2.5 if dropout else 0.0)
    return products + memory_s(device, "softmax", passes * scores)


def _compute_s(
    device: DeviceCosts,
    curve: AttentionCurve,
    *,
    blocks: int,
    dims: float,
    mean: float,
    longest: float,
    equal: bool,
) -> float:
    peak = device.attention_peak_flops / device.sms
    work = sqrt(dims * dims + curve.softmax_dims * curve.softmax_dims)
    per_key_s = 2.0 * QUERY_BLOCK * work / (curve.efficiency * peak)
    waves = blocks / device.sms
    if equal:
        return count_waves(waves, curve.wave) * (longest + curve.fill_keys) * per_key_s
    longest_s = (longest + curve.fill_keys) * per_key_s
    total_s = waves * (mean + curve.fill_keys) * per_key_s
    return max(total_s + curve.tail * longest_s, longest_s)


def _dims(curve: AttentionCurve, head_dim: int, value_dim: int) -> float:
    pad = curve.pad_dims
    head, value = ceil(head_dim / pad) * pad, ceil(value_dim / pad) * pad
    return float(3 * head + 2 * value if curve.part == "backward" else head + value)


def _seen_keys(seq: int, keys: int, mask: AttentionMask, window: int | None) -> float:
    if mask == "full":
        return float(min(keys, window or keys))
    if window is not None and window < keys:
        # Positions before the window has filled see fewer keys.
        filling = max(0.0, window - (keys - seq))
        return window - filling * filling / (2.0 * seq)
    return keys - seq / 2.0


def _mean_keys(seq: int, keys: int, mask: AttentionMask, window: int | None) -> float:
    # Blocks cover whole squares: half of the one on the diagonal is wasted. A window that slides
    # past the squares' edges touches up to two more (serving tables with a window of 128 keys).
    seen = _seen_keys(seq, keys, mask, window)
    if mask == "full":
        return seen
    edges = 2 * QUERY_BLOCK if window is not None and window < keys else QUERY_BLOCK / 2
    return min(float(keys), seen + min(seq, edges))
