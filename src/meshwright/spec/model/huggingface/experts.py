"""The feed-forward parts of a decoder's config: which layers have experts, and their settings."""

from collections.abc import Sequence
from typing import Any

from meshwright.spec.model.feedforward import Experts, FeedForward, Mlp
from meshwright.spec.model.huggingface.attention import read_switch, write_switch
from meshwright.spec.model.huggingface.fields import ACTIVATIONS, Fields, activation_key, put
from meshwright.spec.model.huggingface.traits import Routing, Traits
from meshwright.spec.model.model import Model

_METHODS = {"greedy": "greedy", "group_limited_greedy": "groups"}
_SCORINGS = {"softmax": "softmax", "sigmoid": "sigmoid"}


def read_sparse(fields: Fields, t: Traits, layers: int) -> tuple[bool, ...]:
    """Read for every layer whether it has experts."""
    if t.routing is None:
        return (False,) * layers
    if t.routing.layers == "first":
        first = fields.whole("first_k_dense_replace", t.routing.dense_first, least=0)
        return tuple(index >= first for index in range(layers))
    if t.routing.layers == "step":
        dense = set(fields.wholes("mlp_only_layers") or ())
        step = fields.whole("decoder_sparse_step", 1)
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if t.routing.layers == "interleave":
        step = fields.whole("interleave_moe_layer_step", 1)
        given = fields.wholes("moe_layers")
        sparse = set(given) if given is not None else set(range(step - 1, layers, step))
        return tuple(index in sparse for index in range(layers))
    return (True,) * layers


def read_mlp(fields: Fields, t: Traits, hidden: int, sparse: bool) -> dict[str, Any]:
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
        "bias": read_switch(fields, t.mlp_bias),
    }


def _width(fields: Fields, t: Traits, hidden: int) -> int:
    if t.keys.ffn_ratio:
        return hidden * fields.whole(t.keys.ffn_ratio, 4)
    key = t.routing.dense_key if t.routing is not None else t.keys.ffn
    width = fields.maybe_whole(key, t.ffn) if key else None
    return width if width is not None else 4 * hidden


def _experts(fields: Fields, t: Traits, r: Routing, activation: str) -> dict[str, Any]:
    width = fields.whole(*r.width)
    shared = fields.whole(*r.shared_width, least=0) if r.shared_width[0] else 0
    key, count = r.shared_count
    if key:
        count = fields.maybe_whole(key, count, least=0) or 0
    values: dict[str, Any] = {
        "count": fields.whole(*r.count),
        "top_k": fields.whole(*r.top_k),
        "width": width,
        "shared_width": shared + count * width,
        "shared_gate": r.shared_gate,
        "gated": t.gated,
        "activation": r.activation or activation,
        "bias": r.bias,
        "router_bias": r.router_bias,
        "scoring": r.scoring,
        "normalise": read_switch(fields, r.normalise),
        "scale": fields.number(*r.scale) if r.scale[0] else 1.0,
    }
    if values["top_k"] > values["count"]:
        what = f"{values['top_k']} is more than the {values['count']} experts"
        fields.fault(r.top_k[0], what, f"use at most {values['count']}")
    if r.scoring_key:
        values["scoring"] = fields.word(r.scoring_key, _SCORINGS, r.scoring)
    if r.groups is not None:
        groups = fields.maybe_whole("n_group", r.groups[0]) or 1
        used = fields.maybe_whole("topk_group", r.groups[1]) or 1
        if used > groups:
            fields.fault("topk_group", f"{used} is more than n_group={groups}", str(groups))
        if r.method_key and fields.word(r.method_key, _METHODS, "greedy") == "greedy":
            groups = used = 1
        values.update(groups=groups, groups_used=used)
    return values


def write_mlps(config: dict[str, Any], t: Traits, model: Model) -> None:
    """Write the settings of a model's feed-forward parts, and which layers have experts."""
    mlps = [block.mlp for block in model.layer_blocks()]
    dense = next((mlp for mlp in mlps if isinstance(mlp, Mlp)), None)
    routed = next((mlp for mlp in mlps if isinstance(mlp, Experts)), None)
    either: FeedForward | None = dense if dense is not None else routed
    if either is not None and t.keys.activation:
        word = activation_key(either.activation, t.activation)
        put(config, t.keys.activation, t.activation if t.routing and t.routing.activation else word)
    if t.routing is not None:
        _write_sparse(config, t.routing, [isinstance(mlp, Experts) for mlp in mlps])
    if t.routing is not None and routed is not None:
        _write_experts(config, t.routing, routed)
    if dense is not None:
        key = t.routing.dense_key if t.routing is not None else t.keys.ffn
        if t.keys.ffn_ratio:
            put(config, t.keys.ffn_ratio, dense.width // model.hidden)
        elif key:
            put(config, key, dense.width)
        write_switch(config, t.mlp_bias, dense.bias)


def _write_experts(config: dict[str, Any], r: Routing, routed: Experts) -> None:
    put(config, r.count[0], routed.count)
    put(config, r.top_k[0], routed.top_k)
    put(config, r.width[0], routed.width)
    if r.shared_width[0]:
        put(config, r.shared_width[0], routed.shared_width)
    if r.shared_count[0]:
        put(config, r.shared_count[0], routed.shared_width // routed.width)
    write_switch(config, r.normalise, routed.normalise)
    if r.scale[0]:
        put(config, r.scale[0], routed.scale)
    if r.scoring_key:
        put(config, r.scoring_key, routed.scoring)
    if r.groups is not None:
        put(config, "n_group", routed.groups)
        put(config, "topk_group", routed.groups_used)
    if r.method_key:
        put(config, r.method_key, "group_limited_greedy" if routed.groups > 1 else "greedy")


def _write_sparse(config: dict[str, Any], r: Routing, sparse: Sequence[bool]) -> None:
    layers = len(sparse)
    if r.layers == "first":
        put(config, "first_k_dense_replace", sparse.index(True) if any(sparse) else layers)
        return
    # The sparsest step that gives these layers, so that no list is needed where a step will do.
    step = next(
        (s for s in range(1, layers + 1)
         if all(sparse[i] == ((i + 1) % s == 0) for i in range(layers))),
        None,
    )  # fmt: skip
    if r.layers == "step":
        put(config, "decoder_sparse_step", step or 1)
        dense = [index for index in range(layers) if not sparse[index]]
        put(config, "mlp_only_layers", [] if step else dense)
    if r.layers == "interleave":
        put(config, "interleave_moe_layer_step", step or 1)
        if step is None:
            put(config, "moe_layers", [index for index in range(layers) if sparse[index]])
