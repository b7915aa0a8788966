"""The token mixers of a decoder's config: which layer has which kind, and the kinds' settings.

Layers are `global` (see everything), `local` (a window or a chunk) or `linear` (gated delta rule).
Reading returns plain values; the decoder builds mixers from them once all keys have been read.
"""

import math
from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.spec.model.huggingface.config_fields import ConfigFields, set_key
from meshwright.spec.model.huggingface.family_traits import ConfigFlag, DecoderTraits, FlagOrBool
from meshwright.spec.model.huggingface.rope_fields import read_rope, write_rope_scaling
from meshwright.spec.model.model import Model
from meshwright.spec.model.rotary import AttentionTemperature, Rotary
from meshwright.spec.model.token_mixers import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mixer,
)
from meshwright.spec.serialization import format_value

_KINDS = {
    "full_attention": "global",
    "sliding_attention": "local",
    "chunked_attention": "local",
    "linear_attention": "linear",
}


def read_flag(fields: ConfigFields, switch: FlagOrBool) -> bool:
    """Return a trait that is fixed, or read it from the config."""
    return fields.flag(switch.key, switch.default) if isinstance(switch, ConfigFlag) else switch


def write_flag(config: dict[str, Any], switch: FlagOrBool, value: bool) -> None:
    """Write a switch that the family's config has."""
    if isinstance(switch, ConfigFlag):
        set_key(config, switch.key, value)


def read_layer_types(fields: ConfigFields, t: DecoderTraits, layers: int) -> tuple[str, ...]:
    """Read the kind of every layer."""
    kinds = _default_kinds(fields, t, layers)
    if t.layer_type_rule not in {"upper", "alternate", "types"} and t.linear is None:
        return kinds
    given = fields.list_items("layer_types")
    if given is None:
        return kinds
    words = [word for word, kind in _KINDS.items() if (kind == "linear") == (t.linear is not None)]
    allowed = {"full_attention", *words} - {"sliding_attention" if t.chunked else ""}
    if len(given) != layers:
        what = f"has {len(given)} items, not num_hidden_layers={layers}"
        fields.add_problem("layer_types", what, "name each layer's kind once")
        return kinds
    for index, word in enumerate(given):
        if not isinstance(word, str) or word not in allowed:
            known = ", ".join(sorted(allowed))
            what = f"{format_value(word)} is not one of {known}"
            fields.add_problem(f"layer_types[{index}]", what, "such as full_attention")
            return kinds
    found = tuple(_KINDS[str(word)] for word in given)
    if t.chunked and fields.list_items("no_rope_layers") and found != kinds:
        fields.add_problem("layer_types", "disagrees with no_rope_layers", "make them agree")
    return found


def _default_kinds(fields: ConfigFields, t: DecoderTraits, layers: int) -> tuple[str, ...]:
    local = [False] * layers
    if t.linear is not None:
        interval = fields.integer("full_attention_interval", t.linear.interval)
        return tuple("linear" if (i + 1) % interval else "global" for i in range(layers))
    if t.chunked:
        rope = fields.integers("no_rope_layers")
        if not rope:
            interval = fields.integer("no_rope_layer_interval", t.period)
            rope = tuple(int((i + 1) % interval != 0) for i in range(layers))
        if len(rope) != layers:
            what = f"has {len(rope)} items, not num_hidden_layers={layers}"
            fields.add_problem("no_rope_layers", what, "give one number for each layer")
            return ("global",) * layers
        local = [bool(item) for item in rope]
    elif t.layer_type_rule == "window":
        local = [fields.optional_integer("sliding_window", t.window) is not None] * layers
    elif t.layer_type_rule == "types":
        period = fields.integer("sliding_window_pattern|_sliding_window_pattern", t.period)
        local = [(i + 1) % period != 0 for i in range(layers)]
    elif t.layer_type_rule != "full" and fields.flag("use_sliding_window", False):
        if fields.optional_integer("sliding_window", t.window) is None:
            return ("global",) * layers
        edge = fields.integer("max_window_layers", 28, least=0)
        local = [
            t.layer_type_rule == "switch"
            or (i >= edge if t.layer_type_rule == "upper" else i < edge and i % 2 == 0)
            for i in range(layers)
        ]
    return tuple("local" if item else "global" for item in local)


def read_mixer(
    fields: ConfigFields, t: DecoderTraits, sizes: dict[str, int], kind: str
) -> dict[str, Any]:
    """Read the settings of the mixer of one kind of layer, as values for its class."""
    if kind == "linear":
        return {
            "key_heads": fields.integer("linear_num_key_heads", 16),
            "value_heads": fields.integer("linear_num_value_heads", 32),
            "key_dim": fields.integer("linear_key_head_dim", 128),
            "value_dim": fields.integer("linear_value_head_dim", 128),
            "conv_width": fields.integer("linear_conv_kernel_dim", 4),
        }
    if t.latent:
        return {
            "heads": sizes["heads"],
            "kv_rank": fields.integer("kv_lora_rank", 512),
            "nope_dim": fields.integer("qk_nope_head_dim", 128),
            "rope_dim": fields.integer("qk_rope_head_dim", 64),
            "value_dim": fields.integer("v_head_dim", 128),
            "q_rank": fields.optional_integer("q_lora_rank", t.q_rank),
            "bias": fields.flag("attention_bias", False),
            "rotary": _rotary(fields, t, kind),
        }
    values: dict[str, Any] = {
        **{name: sizes[name] for name in ("heads", "kv_heads", "head_dim")},
        "qkv_bias": read_flag(fields, t.qkv_bias),
        "out_bias": read_flag(fields, t.out_bias),
        "rotary": _rotary(fields, t, kind),
        "gate": t.gate,
        "sinks": t.sinks,
        "scale": _scale(fields, t, sizes["head_dim"]),
        "softcap": fields.optional_number(*t.softcap) if t.softcap[0] else None,
        "clip": fields.optional_number(t.clip_key) if t.clip_key else None,
        "qk_norm": t.qk_norm if read_flag(fields, t.qk_norm_flag or True) else "none",
    }
    if kind == "local":
        key, default = ("attention_chunk_size", 8192) if t.chunked else ("sliding_window", t.window)
        reach = fields.optional_integer(key, default)
        if reach is None:
            fields.add_problem(key, "is null, but some layers need it", "such as 4096")
        values["chunk" if t.chunked else "window"] = reach
    elif t.chunked:
        # Llama 4 norms queries and keys only where it turns them.
        values["qk_norm"] = "none"
        if fields.flag("attn_temperature_tuning", True):
            values["temperature"] = AttentionTemperature(
                floor=fields.integer("floor_scale", 8192), scale=fields.number("attn_scale", 0.1)
            )
    return values


def _rotary(fields: ConfigFields, t: DecoderTraits, kind: str) -> Rotary | None:
    if t.positions != "rotary" or (kind == "global" and not t.global_rotary):
        return None
    interleaved = read_flag(fields, t.interleaved)
    word = "full_attention" if kind == "global" else "sliding_attention"
    fraction = t.fraction if t.fraction is not None else 1.0
    if kind == "local" and t.unscaled_local_rope:
        table = fields.table("rope_parameters")
        if table is None or not table.has(word):
            key, default = (t.keys.theta, t.theta)
            if t.local_theta is not None:
                key, default = ("rope_local_base_freq", t.local_theta)
            near = fields.number(key, default)
            if near <= 0:
                fields.add_problem(key, f"{near!r} is not above 0", str(default))
            return Rotary(theta=near if near > 0 else 1.0, interleaved=interleaved)
    return read_rope(
        fields,
        (t.keys.theta, t.theta),
        (t.keys.fraction, fraction),
        interleaved=interleaved,
        layer_kind=word,
        scaling=t.scaling,
    )


def _scale(fields: ConfigFields, t: DecoderTraits, head_dim: int) -> float | None:
    if t.scale_key:
        scale = fields.optional_number(t.scale_key)
    elif t.scalar_key:
        scalar = fields.number(t.scalar_key, 256)
        if scalar <= 0:
            fields.add_problem(t.scalar_key, f"{scalar!r} is not above 0", str(head_dim))
            return None
        scale = scalar**-0.5
    else:
        return None
    return None if scale == head_dim**-0.5 else scale


def get_layer_type(mixer: Mixer | None) -> str:
    """Tell which kind of layer a mixer makes."""
    if isinstance(mixer, GatedDeltaNetSpec):
        return "linear"
    if isinstance(mixer, AttentionSpec) and (mixer.window is not None or mixer.chunk is not None):
        return "local"
    return "global"


def write_mixers(config: dict[str, Any], t: DecoderTraits, model: Model) -> None:
    """Write the settings of a model's mixers, and which layer has which."""
    mixers = [block.mixer for block in model.layer_blocks()]
    kinds = [get_layer_type(mixer) for mixer in mixers]
    # Settings that all kinds share come from the first that sees everything.
    first = {kind: mixers[kinds.index(kind)] for kind in reversed(kinds)}
    main = first.get("global") or first.get("local")
    if isinstance(main, LatentAttentionSpec) and t.latent:
        _write_latent(config, t, main)
    elif isinstance(main, AttentionSpec) and not t.latent:
        _write_attention(config, t, main, first.get("local"))
    elif main is not None or t.linear is None:
        wanted = "latent" if t.latent else "softmax"
        given = type(main).__name__ if main is not None else "none"
        what = f"{t.model_type} needs {wanted} attention, this is {given}"
        raise InputError([Problem("blocks.mixer", what, "write it as another family")])
    linear = first.get("linear")
    if isinstance(linear, GatedDeltaNetSpec):
        set_key(config, "linear_num_key_heads", linear.key_heads)
        set_key(config, "linear_num_value_heads", linear.value_heads)
        set_key(config, "linear_key_head_dim", linear.key_dim)
        set_key(config, "linear_value_head_dim", linear.value_dim)
        set_key(config, "linear_conv_kernel_dim", linear.conv_width)
    _write_kinds(config, t, kinds, first.get("local"))


def _write_attention(
    config: dict[str, Any], t: DecoderTraits, main: AttentionSpec, local: Mixer | None
) -> None:
    set_key(config, t.keys.heads, main.heads)
    for key, value in ((t.keys.kv_heads, main.kv_heads), (t.keys.head_dim, main.head_dim)):
        if key:
            set_key(config, key, value)
    write_flag(config, t.qkv_bias, main.qkv_bias)
    write_flag(config, t.out_bias, main.out_bias)
    turned = local if isinstance(local, AttentionSpec) and not t.global_rotary else main
    if t.qk_norm_flag is not None:
        set_key(config, t.qk_norm_flag.key, turned.qk_norm != "none")
    if turned.rotary is not None:
        _write_rotary(config, t, turned.rotary)
    if t.local_theta is not None:
        near = local.rotary if isinstance(local, AttentionSpec) else None
        set_key(config, "rope_local_base_freq", near.theta if near is not None else t.local_theta)
    scale = main.scale if main.scale is not None else main.head_dim**-0.5
    if t.scale_key:
        set_key(config, t.scale_key, scale)
    if t.scalar_key and scale > 0:
        scalar = scale**-2
        whole = round(scalar)
        set_key(config, t.scalar_key, whole if math.isclose(scalar, whole) else scalar)
    if t.softcap[0]:
        set_key(config, t.softcap[0], main.softcap)
    if t.clip_key:
        set_key(config, t.clip_key, main.clip)
    if t.chunked:
        set_key(config, "attn_temperature_tuning", main.temperature is not None)
        if main.temperature is not None:
            set_key(config, "floor_scale", main.temperature.floor)
            set_key(config, "attn_scale", main.temperature.scale)


def _write_latent(config: dict[str, Any], t: DecoderTraits, main: LatentAttentionSpec) -> None:
    set_key(config, t.keys.heads, main.heads)
    set_key(config, t.keys.kv_heads, main.heads)
    set_key(config, "kv_lora_rank", main.kv_rank)
    set_key(config, "q_lora_rank", main.q_rank)
    set_key(config, "qk_nope_head_dim", main.nope_dim)
    set_key(config, "qk_rope_head_dim", main.rope_dim)
    set_key(config, "v_head_dim", main.value_dim)
    set_key(config, "attention_bias", main.bias)
    if main.rotary is not None:
        _write_rotary(config, t, main.rotary)


def _write_rotary(config: dict[str, Any], t: DecoderTraits, rotary: Rotary) -> None:
    set_key(config, t.keys.theta, rotary.theta)
    set_key(config, "rope_scaling", write_rope_scaling(rotary))
    if rotary.scaling == "longrope" and rotary.original_positions is not None:
        # Phi-3's class takes it from here alone, and falls back to a number of its own.
        set_key(config, "original_max_position_embeddings", rotary.original_positions)
    write_flag(config, t.interleaved, rotary.interleaved)
    if t.fraction is not None:
        set_key(config, t.keys.fraction, rotary.fraction)


def _write_kinds(
    config: dict[str, Any], t: DecoderTraits, kinds: Sequence[str], local: Mixer | None
) -> None:
    window = local.window if isinstance(local, AttentionSpec) else None
    words = {"global": "full_attention", "local": "sliding_attention", "linear": "linear_attention"}
    if t.chunked:
        words["local"] = "chunked_attention"
        set_key(config, "no_rope_layers", [int(kind == "local") for kind in kinds])
        chunk = local.chunk if isinstance(local, AttentionSpec) else None
        set_key(config, "attention_chunk_size", chunk if chunk is not None else 8192)
    elif t.layer_type_rule == "window":
        set_key(config, "sliding_window", window)
    elif t.layer_type_rule == "types":
        set_key(config, "sliding_window", window if window is not None else t.window)
    elif t.layer_type_rule != "full":
        set_key(config, "use_sliding_window", window is not None)
        set_key(config, "sliding_window", window)
        edge = (
            kinds.index("local")
            if t.layer_type_rule == "upper" and "local" in kinds
            else len(kinds)
        )
        set_key(config, "max_window_layers", edge)
    mixed = t.layer_type_rule in {"upper", "alternate"} and "local" in kinds
    if t.chunked or t.layer_type_rule == "types" or t.linear is not None or mixed:
        set_key(config, "layer_types", [words[kind] for kind in kinds])
