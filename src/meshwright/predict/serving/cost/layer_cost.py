"""What the layers of a replica take for so many tokens, before any engine is asked.

Per step and GPU: products (dense and experts'), bytes of small kernels, messages between GPUs.
Everything here grows with the number of tokens alone; what grows with their contexts (attention) is
in `attention_cost`. With attention data parallel each GPU has its share of the tokens, and experts
see those of all.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from meshwright.predict.cost.device_costs import DeviceCosts
from meshwright.predict.cost.gemm import count_waves, gemm_s, smooth_max
from meshwright.predict.cost.memory_bound import memory_s
from meshwright.predict.network.nccl_constants import parse_sm
from meshwright.predict.serving.cost.quantization import (
    Quantization,
    QuantizedWeight,
    get_lm_head_format,
    get_quantized_weight,
)
from meshwright.spec.layout import Layout
from meshwright.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, Model, MoESpec
from meshwright.spec.model.weights import Weight

FUSED_WEIGHTS = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up", "shared_gate": "shared_up",
          "q_down": "down", "kv_down": "down"}  # fmt: skip
"""Matrices with the same input that every engine multiplies as one."""
GROUPED_COLUMNS = 256
EXPERT_OVERLAP_EXPONENT = 0.85
"""Exponent of the tokens that choose experts on their own: requests in flight write alike, and so
visit fewer experts together than an even draw would."""
BLACKWELL_SM = 100
PRE_BLACKWELL_EXPERT_SLOWDOWN = 1.3
"""Time of experts' products over that of the bytes and tiles, on chips before Blackwell: their
grouped kernels widen or rescale on the way (all engines; H100 and H200 alike)."""
_TILES = (16, 32, 64, 128)


class TokenCost(NamedTuple):
    """What a step's layers take for one number of tokens, on the busiest GPU."""

    gemms_s: float
    """Matrix products."""
    experts_s: float
    """Grouped products of experts."""
    small_kernels_s: float
    """Small kernels, without their launches."""
    low_precision_gemms: int
    """Dense products of fewer than 16 bits."""
    bf16_gemms: int
    """Dense products of 16 bits."""
    cast_s: float
    """Kernels that round their inputs, where no other does it on its way."""
    all_reduce_bytes: float
    """Message of one all-reduce."""
    dispatch_bytes: float
    """What one GPU sends to others' experts in one layer, and gets back."""


class LayerCounts(NamedTuple):
    """How often a step does what."""

    layers: int
    attention_layers: int
    moe_layers: int
    """Layers with experts."""
    all_reduces: int
    """All-reduces over the tensor group."""
    expert_dispatches: int
    """Layers whose tokens travel to experts and back."""


def count_layers(model: Model, layout: Layout) -> LayerCounts:
    """Count what happens once per layer."""
    attentions = sparse = reduces = exchanges = 0
    spread = layout.dp > 1
    for block, layers in model.count_layers_by_block():
        attentions += layers * isinstance(block.mixer, AttentionSpec | LatentAttentionSpec)
        experts = isinstance(block.mlp, MoESpec)
        sparse += layers * experts
        travels = experts and spread
        exchanges += layers * travels
        if layout.tp > 1:
            reduces += layers * (
                (block.mixer is not None) + (block.mlp is not None and not travels)
            )
    return LayerCounts(model.layers, attentions, sparse, reduces, exchanges)


@lru_cache(maxsize=1 << 15)
def token_cost(
    device: DeviceCosts, model: Model, layout: Layout, formats: Quantization, tokens: int
) -> TokenCost:
    """Return what all layers take for `tokens` new tokens of a step."""
    own = ceil(tokens / layout.dp)
    products = experts = small = rounded = 0.0
    casts = wide_products = 0
    for block, layers in model.count_layers_by_block():
        dense, sparse = _products(device, (model, block), (layout, formats), tokens)
        for out, inner, how in dense:
            each = gemm_s(device, own, out, inner, how.compute, weight_bytes=how.weight_bytes)
            products += layers * each
            narrow = device.get_gemm_rate(how.compute).input_bytes
            if narrow < 2.0:
                casts += layers
                rounded += layers * memory_s(device, "quantise", own * inner * (2.0 + narrow))
            elif narrow == 2.0:
                wide_products += layers
        experts += layers * sparse
        # Small kernels move activations of sixteen bits, unless they are wider.
        wide = formats.activation_bytes / 2.0
        small += layers * wide * _small_s(device, model, block, layout, own)
    routed = model.moe
    sent = 0.0
    if routed is not None and layout.dp > 1:
        elsewhere = _distinct(layout.ep, routed.top_k)
        # GPUs of a tensor group have the same tokens, and each sends its share of them: what they
        # add up after attention is scattered before, and gathered behind the experts.
        each = ceil(own / layout.tp)
        sent = each * elsewhere * model.hidden * (min(2.0, 1.0 + 1 / 32) + 2.0)
    reduced = formats.activation_bytes * own * model.hidden
    return TokenCost(products, experts, small, casts, wide_products, rounded, reduced, sent)


def lm_head_s(
    device: DeviceCosts, model: Model, layout: Layout, formats: Quantization, rows: int
) -> float:
    """Return the seconds of the output head and of choosing a token, for so many rows."""
    if rows <= 0:
        return 0.0
    own = ceil(rows / layout.dp)
    columns = ceil(model.vocab / layout.tp)
    how = get_lm_head_format(device.gpu, formats)
    product = gemm_s(device, own, columns, model.hidden, how.compute)
    # Logits are widened, divided by the temperature, summed up and searched: four passes of fp32.
    return product + memory_s(device, "softmax", 4 * 4.0 * own * columns)


def _products(
    device: DeviceCosts,
    what: tuple[Model, BlockSpec],
    where: tuple[Layout, Quantization],
    tokens: int,
) -> tuple[Iterable[tuple[int, int, QuantizedWeight]], float]:
    """Return outputs and inputs of one layer's dense products, and the seconds of its experts'."""
    (model, block), (layout, formats) = what, where
    joined: dict[str, tuple[int, int, QuantizedWeight]] = {}
    experts = 0.0
    for weight in block.list_weights(model.hidden):
        how = get_quantized_weight(model, weight, formats, device.gpu)
        if weight.part == "expert":
            if weight.name != "expert_gate":
                wide = 2 if weight.name == "expert_up" and _gated(block) else 1
                wider = weight._replace(fan_out=wide * weight.fan_out)
                experts += _grouped_s(device, wider, layout, how, tokens)
            continue
        rows, columns = _sides(weight, layout.tp)
        name = FUSED_WEIGHTS.get(weight.name, weight.name)
        before = joined.get(name, (0, rows, how))
        joined[name] = (before[0] + columns, rows, how)
    return joined.values(), experts


def _gated(block: BlockSpec) -> bool:
    return isinstance(block.mlp, MoESpec) and block.mlp.gated


def _sides(weight: Weight, tp: int) -> tuple[int, int]:
    """Return inputs and outputs of one GPU's part of a matrix."""
    shards = weight.count_shards(tp)
    if weight.split == "row":
        return ceil(weight.fan_in / shards), weight.fan_out
    return weight.fan_in, ceil(weight.fan_out / shards)


def expected_active_experts(count: int, top_k: int, tokens: float) -> float:
    """Return how many of `count` experts `tokens` tokens visit that choose evenly."""
    return count * (1.0 - math.pow(1.0 - top_k / count, tokens))


def _distinct(places: int, draws: int) -> float:
    """Return to how many of `places` GPUs a token goes that chooses `draws` experts."""
    return expected_active_experts(places, 1, draws)


def _copies(layout: Layout) -> int:
    """Return how often the experts lie on the GPUs of a stage."""
    return max(1, layout.tp * layout.dp // (layout.ep * layout.effective_expert_tp))


def _grouped_s(
    device: DeviceCosts, weight: Weight, layout: Layout, how: QuantizedWeight, tokens: int
) -> float:
    """Return the seconds of one grouped product of the experts that a step's tokens visit."""
    seen = tokens / _copies(layout)
    some = expected_active_experts(weight.copies, weight.active, seen**EXPERT_OVERLAP_EXPONENT)
    groups = max(1.0, some / layout.ep)
    each = max(1.0, seen * weight.active / some)
    column = weight.name != "expert_down"
    inner = weight.fan_in if column else ceil(weight.fan_in / layout.effective_expert_tp)
    out = ceil(weight.fan_out / layout.effective_expert_tp) if column else weight.fan_out
    rate = device.get_grouped_gemm_rate(how.compute)
    rows = next((tile for tile in _TILES if each <= tile), _TILES[-1])
    waves = groups * ceil(each / rows) * ceil(out / GROUPED_COLUMNS) / device.sms
    work = 2.0 * rows * GROUPED_COLUMNS * (inner + rate.fill_k)
    compute_s = count_waves(waves, rate.tail) * work / rate.flops_per_sm
    moved = groups * (inner * (rate.input_bytes * each + how.weight_bytes * out) + 2.0 * each * out)
    # The launch of a dense product: what sorting and summing add is the engine's.
    launch_s = device.get_gemm_rate(how.compute).launch_s
    gap = PRE_BLACKWELL_EXPERT_SLOWDOWN if (parse_sm(device.gpu.arch) or 0) < BLACKWELL_SM else 1.0
    return launch_s + gap * smooth_max(compute_s, moved / rate.bytes_per_s)


def _small_s(
    device: DeviceCosts, model: Model, block: BlockSpec, layout: Layout, own: int
) -> float:
    """Return the seconds of bytes that a layer's small kernels move."""
    hidden, tp = model.hidden, layout.tp
    # A norm adds the residual on its way: it reads and writes both.
    moved = 4.0 * 2.0 * hidden * block.count_norms()
    mixer = block.mixer
    if isinstance(mixer, AttentionSpec):
        moved += 4.0 * (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim / tp
    elif isinstance(mixer, LatentAttentionSpec):
        moved += 4.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim) / tp
    elif mixer is not None:
        moved += (
            4.0 * sum(w.fan_out for w in mixer.list_weights(hidden) if w.split == "column") / tp
        )
    mlp = block.mlp
    if isinstance(mlp, MoESpec):
        # Rows of all attention groups come together, on one of the groups of experts.
        routed = mlp.top_k * layout.dp / (layout.ep * _copies(layout))
        moved += routed * (6.0 * mlp.width / layout.effective_expert_tp + 8.0 * hidden)
        moved += 6.0 * mlp.shared_width / tp
    elif mlp is not None:
        moved += 6.0 * mlp.width / tp
    return own * moved / (device.memory_efficiency["norm"] * device.bytes_per_s)
