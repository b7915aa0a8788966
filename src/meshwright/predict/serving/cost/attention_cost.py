"""What attention takes in serving: seconds per key read, per pair computed, and per request.

Decoding reads every key and value once (or the latent of MLA), which is a matter of bandwidth;
heads that share many queries may be bound by products instead. Prompts compute pairs of queries
and keys, as flash kernels do. Layers with a window read at most the window; recurrent layers
read and write a state of fixed size.
"""

from math import hypot
from typing import NamedTuple

from meshwright.predict.cost.device_costs import DeviceCosts
from meshwright.predict.serving.cost.quantization import KV_BYTES, Quantization
from meshwright.predict.serving.cost.serving_engine import ServingEngine
from meshwright.spec.layout import Layout
from meshwright.spec.model import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Model,
)

LATENT_EFFICIENCY = 0.6
"""Share of the 16-bit peak that decoding kernels of MLA reach where products bind them (FlashMLA's
README: 660 of 989 TFLOP/s on the H800)."""
RECURRENT_EFFICIENCY = 0.15
"""Share of the peak that chunked recurrences reach over prompts: short products with scans
between."""
STATE_BYTES = 4.0
"""Recurrent states are kept in fp32."""


class SlidingWindowLayers(NamedTuple):
    """Layers that look back a limited way."""

    window_tokens: int
    key_s: float
    """Seconds per key of a decoding request within the window."""
    pair_s: float
    """Seconds per pair of a prompt within it."""


class AttentionCost(NamedTuple):
    """What a step's attention takes beyond what its tokens alone do."""

    key_s: float
    """Seconds per key of decoding requests, in layers without a window."""
    pair_s: float
    """Seconds per pair of queries and keys of prompts, in layers without a window."""
    request_s: float
    """Seconds per decoding request: recurrent states."""
    token_s: float
    """Seconds per token of prompts: recurrences."""
    sliding_window_layers: tuple[SlidingWindowLayers, ...]


class KVBytes(NamedTuple):
    """Memory that requests take on the fullest GPU."""

    bytes_per_token: float
    """Per token, in layers that keep all of them."""
    bytes_per_request: float
    """Per request: recurrent states."""
    window_bytes_per_token: tuple[tuple[int, float], ...]
    """Per token up to a window."""

    def request_kv_bytes(self, tokens: float) -> float:
        """Return the bytes of one request with so many tokens."""
        limited = sum(min(tokens, window) * size for window, size in self.window_bytes_per_token)
        return self.bytes_per_request + tokens * self.bytes_per_token + limited


def count_kv_bytes(model: Model, layout: Layout, formats: Quantization) -> KVBytes:
    """Return what one request's keys, values and states take on one GPU of a stage."""
    element = KV_BYTES[formats.kv]
    token = request = 0.0
    windows: dict[int, float] = {}
    for block, layers in model.count_layers_by_block():
        mixer = block.mixer
        if isinstance(mixer, AttentionSpec):
            size = layers * 2 * _kv_heads(mixer, layout.tp) * mixer.head_dim * element
            reach = mixer.window or mixer.chunk
            if reach is None:
                token += size
            else:
                windows[reach] = windows.get(reach, 0.0) + size / layout.pp
        elif isinstance(mixer, LatentAttentionSpec):
            # One latent serves all heads, so every GPU of a tensor group keeps it whole.
            token += layers * (mixer.kv_rank + mixer.rope_dim) * element
        elif mixer is not None:
            request += layers * STATE_BYTES * _state(mixer) / layout.tp
    return KVBytes(token / layout.pp, request / layout.pp, tuple(sorted(windows.items())))


def build_attention_cost(
    device: DeviceCosts, model: Model, layout: Layout, formats: Quantization, engine: ServingEngine
) -> AttentionCost:
    """Return what attention takes per key, pair, request and token, over all layers of a step.

    Figures are of the whole batch: with attention data parallel a GPU has its share of it.
    """
    element = KV_BYTES[formats.kv]
    share, gap, edge_keys = _attention(engine, narrow=element < KV_BYTES["bf16"])
    read_s = 1.0 / (share * device.bytes_per_s)
    key = pair = request = token = 0.0
    windows: dict[int, tuple[float, float]] = {}
    for block, layers in model.count_layers_by_block():
        mixer = block.mixer
        if isinstance(mixer, AttentionSpec):
            per_key = layers * 2 * _kv_heads(mixer, layout.tp) * mixer.head_dim * element * read_s
            heads = mixer.heads / layout.tp
            per_pair = layers * heads * pair_s(device, mixer.head_dim, mixer.head_dim)
            reach = mixer.window or mixer.chunk
            if reach is None:
                key += per_key
                pair += per_pair
            else:
                old = windows.get(reach, (0.0, 0.0))
                windows[reach] = (old[0] + per_key, old[1] + per_pair)
        elif isinstance(mixer, LatentAttentionSpec):
            width = mixer.kv_rank + mixer.rope_dim
            heads = mixer.heads / layout.tp
            flops = 2.0 * heads * (width + mixer.kv_rank)
            compute_s = flops / (LATENT_EFFICIENCY * device.attention_peak_flops)
            key += layers * max(width * element * read_s, compute_s)
            wide = mixer.nope_dim + mixer.rope_dim
            pair += layers * heads * pair_s(device, wide, mixer.value_dim)
        elif mixer is not None:
            request += layers * 2 * STATE_BYTES * _state(mixer) / layout.tp * read_s
            rate = RECURRENT_EFFICIENCY * device.attention_peak_flops
            token += layers * mixer.core_flops(1) / layout.tp / rate
    token += edge_keys * (pair + sum(per_pair for _, per_pair in windows.values()))
    part = 1.0 / layout.dp
    gap *= part
    return AttentionCost(
        key * part,
        pair * gap,
        request * part,
        token * gap,
        tuple(SlidingWindowLayers(w, k * part, p * gap) for w, (k, p) in sorted(windows.items())),
    )


def _attention(engine: ServingEngine, *, narrow: bool) -> tuple[float, float, float]:
    """Return the share of the bandwidth, the gap and the edges of an engine's attention."""
    given = (engine.kv_bandwidth_share, engine.attention_slowdown, engine.tile_overhead_keys)
    own = (
        engine.fp8_kv_bandwidth_share,
        engine.fp8_kv_attention_slowdown,
        engine.fp8_kv_tile_overhead_keys,
    )
    share, gap, edge = (
        plain if special is None or not narrow else special
        for plain, special in zip(given, own, strict=True)
    )
    return share, gap, edge


def _kv_heads(mixer: AttentionSpec, tp: int) -> float:
    return max(1.0, mixer.kv_heads / tp)


def _state(mixer: GatedDeltaNetSpec | Mamba2Spec) -> float:
    """Count the numbers of a recurrent layer's state."""
    if isinstance(mixer, GatedDeltaNetSpec):
        return mixer.value_heads * mixer.key_dim * mixer.value_dim
    return mixer.heads * mixer.head_dim * mixer.state_dim


def pair_s(device: DeviceCosts, head_dim: int, value_dim: int) -> float:
    """Return the seconds of one query and key of one head, by the device's flash kernel."""
    curve = device.get_attention_curve("native", "forward")
    work = hypot(head_dim + value_dim, curve.softmax_dims)
    return 2.0 * work / (curve.efficiency * device.attention_peak_flops)
