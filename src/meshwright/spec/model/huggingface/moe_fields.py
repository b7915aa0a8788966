"""The feed-forward parts of a decoder's config: which layers have experts, and their settings."""

from collections.abc import Sequence
from typing import Any

from meshwright.spec.model.feedforward import FeedForward, MLPSpec, MoESpec
from meshwright.spec.model.huggingface.attention_fields import read_flag, write_flag
from meshwright.spec.model.huggingface.config_fields import (
    ACTIVATIONS,
    ConfigFields,
    activation_key,
    set_key,
)
from meshwright.spec.model.huggingface.family_traits import DecoderTraits, RouterKeys
from meshwright.spec.model.model import Model

_METHODS = {"greedy": "greedy", "group_limited_greedy": "groups"}
_SCORINGS = {"softmax": "softmax", "sigmoid": "sigmoid"}


def read_moe_layers(fields: ConfigFields, t: DecoderTraits, layers: int) -> tuple[bool, ...]:
    """Read for every layer whether it has experts."""
    if t.routing is None:
        return (False,) * layers
    if t.routing.layers == "first":
        first = fields.integer("first_k_dense_replace", t.routing.dense_first, least=0)
        return tuple(index >= first for index in range(layers))
    if t.routing.layers == "step":
        dense = set(fields.integers("mlp_only_layers") or ())
        step = fields.integer("decoder_sparse_step", 1)
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if t.routing.layers == "interleave":
        step = fields.integer("interleave_moe_layer_step", 1)
        given = fields.integers("moe_layers")
        sparse = set(given) if given is not None else set(range(step - 1, layers, step))
        return tuple(index in sparse for index in range(layers))
    return (True,) * layers


def read_mlp(fields: ConfigFields, t: DecoderTraits, hidden: int, sparse: bool) -> dict[str, Any]:
    """Read the settings of a feed-forward part, as values for its class."""
    activation = ACTIVATIONS[t.activation]
    if t.keys.activation:
        activation = fields.activation(t.keys.activation, t.activation)
    if sparse and t.routing is not None:
        return _experts(fields, t, t.routing, activation)
    return {
        "width": _width(fields, t, hidden),
        "gated": t.gated,
        "activation": activation,
        "bias": read_flag(fields, t.mlp_bias),
    }


def _width(fields: ConfigFields, t: DecoderTraits, hidden: int) -> int:
    if t.keys.ffn_ratio:
        return hidden * fields.integer(t.keys.ffn_ratio, 4)
    key = t.routing.dense_key if t.routing is not None else t.keys.ffn
    width = fields.optional_integer(key, t.ffn) if key else None
    return width if width is not None else 4 * hidden


def _experts(
    fields: ConfigFields, t: DecoderTraits, r: RouterKeys, activation: str
) -> dict[str, Any]:
    width = fields.integer(*r.width)
    shared = fields.integer(*r.shared_width, least=0) if r.shared_width[0] else 0
    key, count = r.shared_count
    if key:
        count = fields.optional_integer(key, count, least=0) or 0
    values: dict[str, Any] = {
        "count": fields.integer(*r.count),
        "top_k": fields.integer(*r.top_k),
        "width": width,
        "shared_width": shared + count * width,
        "shared_gate": r.shared_gate,
        "gated": t.gated,
        "activation": r.activation or activation,
        "bias": r.bias,
        "router_bias": r.router_bias,
        "scoring": r.scoring,
        "normalise": read_flag(fields, r.normalise),
        "scale": fields.number(*r.scale) if r.scale[0] else 1.0,
    }
    if values["top_k"] > values["count"]:
        what = f"{values['top_k']} is more than the {values['count']} experts"
        fields.add_problem(r.top_k[0], what, f"use at most {values['count']}")
    if r.scoring_key:
        values["scoring"] = fields.choice(r.scoring_key, _SCORINGS, r.scoring)
    if r.groups is not None:
        groups = fields.optional_integer("n_group", r.groups[0]) or 1
        used = fields.optional_integer("topk_group", r.groups[1]) or 1
        if used > groups:
            fields.add_problem("topk_group", f"{used} is more than n_group={groups}", str(groups))
        if r.method_key and fields.choice(r.method_key, _METHODS, "greedy") == "greedy":
            groups = used = 1
        values.update(groups=groups, groups_used=used)
    return values


def write_mlps(config: dict[str, Any], t: DecoderTraits, model: Model) -> None:
    """Write the settings of a model's feed-forward parts, and which layers have experts."""
    mlps = [block.mlp for block in model.layer_blocks()]
    dense = next((mlp for mlp in mlps if isinstance(mlp, MLPSpec)), None)
    routed = next((mlp for mlp in mlps if isinstance(mlp, MoESpec)), None)
    either: FeedForward | None = dense if dense is not None else routed
    if either is not None and t.keys.activation:
        word = activation_key(either.activation, t.activation)
        set_key(
            config, t.keys.activation, t.activation if t.routing and t.routing.activation else word
        )
    if t.routing is not None:
        _write_sparse(config, t.routing, [isinstance(mlp, MoESpec) for mlp in mlps])
    if t.routing is not None and routed is not None:
        _write_experts(config, t.routing, routed)
    if dense is not None:
        key = t.routing.dense_key if t.routing is not None else t.keys.ffn
        if t.keys.ffn_ratio:
            set_key(config, t.keys.ffn_ratio, dense.width // model.hidden)
        elif key:
            set_key(config, key, dense.width)
        write_flag(config, t.mlp_bias, dense.bias)


def _write_experts(config: dict[str, Any], r: RouterKeys, routed: MoESpec) -> None:
    set_key(config, r.count[0], routed.count)
    set_key(config, r.top_k[0], routed.top_k)
    set_key(config, r.width[0], routed.width)
    if r.shared_width[0]:
        set_key(config, r.shared_width[0], routed.shared_width)
    if r.shared_count[0]:
        set_key(config, r.shared_count[0], routed.shared_width // routed.width)
    write_flag(config, r.normalise, routed.normalise)
    if r.scale[0]:
        set_key(config, r.scale[0], routed.scale)
    if r.scoring_key:
        set_key(config, r.scoring_key, routed.scoring)
    if r.groups is not None:
        set_key(config, "n_group", routed.groups)
        set_key(config, "topk_group", routed.groups_used)
    if r.method_key:
        set_key(config, r.method_key, "group_limited_greedy" if routed.groups > 1 else "greedy")


def _write_sparse(config: dict[str, Any], r: RouterKeys, sparse: Sequence[bool]) -> None:
    layers = len(sparse)
    if r.layers == "first":
        set_key(config, "first_k_dense_replace", sparse.index(True) if any(sparse) else layers)
        return
    # The sparsest step that gives these layers, so that no list is needed where a step will do.
    step = next(
        (s for s in range(1, layers + 1)
         if all(sparse[i] == ((i + 1) % s == 0) for i in range(layers))),
        None,
    )  # fmt: skip
    if r.layers == "step":
        set_key(config, "decoder_sparse_step", step or 1)
        dense = [index for index in range(layers) if not sparse[index]]
        set_key(config, "mlp_only_layers", [] if step else dense)
    if r.layers == "interleave":
        set_key(config, "interleave_moe_layer_step", step or 1)
        if step is None:
            set_key(config, "moe_layers", [index for index in range(layers) if sparse[index]])
