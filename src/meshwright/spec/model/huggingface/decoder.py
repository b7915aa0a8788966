"""One reader and one writer for every family of decoders that `DecoderTraits` can describe."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.spec.model.block import BlockSpec
from meshwright.spec.model.feedforward import FeedForward, MLPSpec, MoESpec
from meshwright.spec.model.huggingface.attention_fields import (
    read_flag,
    read_layer_types,
    read_mixer,
    write_flag,
    write_mixers,
)
from meshwright.spec.model.huggingface.config_fields import ConfigFields, set_key
from meshwright.spec.model.huggingface.family_traits import DecoderTraits
from meshwright.spec.model.huggingface.moe_fields import read_mlp, read_moe_layers, write_mlps
from meshwright.spec.model.layer_pattern import MAX_LAYERS, compress_pattern
from meshwright.spec.model.model import Model, MtpSpec
from meshwright.spec.model.token_mixers import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mixer,
)


def read_decoder(fields: ConfigFields, t: DecoderTraits) -> Model:
    """Read a decoder's config, or raise every fault in it at once."""
    sizes = _sizes(fields, t)
    kinds = read_layer_types(fields, t, sizes["layers"])
    sparse = read_moe_layers(fields, t, sizes["layers"])
    mixers = {kind: read_mixer(fields, t, sizes, kind) for kind in sorted(set(kinds))}
    mlps = {some: read_mlp(fields, t, sizes["hidden"], some) for some in sorted(set(sparse))}
    values = _around(fields, t, sizes["hidden"])
    place = t.norm_position
    if t.parallel is not None and fields.flag(*t.parallel[0]):
        place = t.parallel[1]
    heads = 0
    if t.multi_token is not None:
        heads = fields.integer("num_nextn_predict_layers", t.multi_token, least=0)
    fields.raise_problems()
    names = _layer_names(kinds, sparse)
    blocks = {
        name: BlockSpec(
            name=name, mixer=_mixer(t, kind, mixers[kind]), mlp=_mlp(some, mlps[some]), norms=place
        )
        for name, kind, some in dict.fromkeys(zip(names, kinds, sparse, strict=True))
    }
    return Model(
        name=t.model_type,
        family=t.model_type,
        hidden=sizes["hidden"],
        vocab=sizes["vocab"],
        blocks=tuple(blocks.values()),
        pattern=compress_pattern(names),
        multi_token=MtpSpec(depth=heads, block=names[-1]) if heads else None,
        **values,
    )


def _sizes(fields: ConfigFields, t: DecoderTraits) -> dict[str, int]:
    keys = t.keys
    # Any of them may rest on the class's default (Llava leaves out all but one), but not all.
    fields.require_any(keys.hidden, keys.heads, keys.ffn, keys.vocab)
    hidden = fields.integer(keys.hidden, t.hidden)
    heads = fields.integer(keys.heads, t.heads)
    sizes = {
        "hidden": hidden,
        "heads": heads,
        "layers": fields.integer(keys.layers, t.layers, most=MAX_LAYERS),
        "vocab": fields.integer(keys.vocab, t.vocab),
    }
    if t.latent:
        # Every head has its own keys and values, rebuilt from the latent.
        if fields.has(keys.kv_heads):
            fields.require_value(keys.kv_heads, heads)
        return sizes
    kv_heads = t.kv_heads
    if keys.kv_heads:
        kv_heads = fields.optional_integer(keys.kv_heads, t.kv_heads)
    kv_heads = kv_heads if kv_heads is not None else heads
    if heads % kv_heads:
        fields.add_problem(keys.kv_heads, f"{kv_heads} does not divide {keys.heads}={heads}",
                     f"use {math.gcd(heads, kv_heads)}")  # fmt: skip
        kv_heads = heads
    head_dim = fields.optional_integer(keys.head_dim, t.head_dim) if keys.head_dim else None
    if head_dim is None:
        if hidden % heads:
            fields.add_problem(keys.heads, f"{heads} does not divide {keys.hidden}={hidden}",
                         f"set {keys.head_dim}" if keys.head_dim
                         else f"use {math.gcd(hidden, heads)}")  # fmt: skip
        head_dim = max(1, hidden // heads)
    return {**sizes, "kv_heads": kv_heads, "head_dim": head_dim}


def _around(fields: ConfigFields, t: DecoderTraits, hidden: int) -> dict[str, Any]:
    """Read what surrounds the layers."""
    keys = t.keys
    eps = fields.number(keys.eps, t.eps) if keys.eps else t.eps
    if eps < 0:
        fields.add_problem(keys.eps, f"{eps!r} is negative", "1e-5")
    for key, value in t.fixed.items():
        fields.require_value(key, value)
    if t.same_as_hidden:
        fields.require_value(t.same_as_hidden, hidden)
    scale = math.sqrt(hidden) if t.sqrt_embedding else None
    if t.embedding_scale_key:
        scale = fields.optional_number(t.embedding_scale_key)
    positions = (
        fields.integer(keys.positions, t.max_positions) if keys.positions else t.max_positions
    )
    return {
        "norm": msgspec.structs.replace(t.norm, eps=max(eps, 0.0)),
        "tied": fields.flag(keys.tied, t.tied),
        "head_bias": read_flag(fields, t.head_bias),
        "positions": t.positions,
        "max_positions": positions,
        "position_offset": t.position_offset,
        "embedding_norm": t.embedding_norm,
        "embedding_scale": scale,
        "logit_scale": fields.optional_number(*t.logit_scale) if t.logit_scale[0] else None,
        "logit_softcap": fields.optional_number(*t.logit_softcap) if t.logit_softcap[0] else None,
    }


def _mixer(t: DecoderTraits, kind: str, values: dict[str, Any]) -> Mixer:
    if kind == "linear":
        return GatedDeltaNetSpec(**values)
    return LatentAttentionSpec(**values) if t.latent else AttentionSpec(**values)


def _mlp(sparse: bool, values: dict[str, Any]) -> FeedForward:
    return MoESpec(**values) if sparse else MLPSpec(**values)


def _layer_names(kinds: Sequence[str], sparse: Sequence[bool]) -> tuple[str, ...]:
    """Name each layer by what sets it apart: `dense`, `moe`, `local`, `global-moe`."""
    words = ["moe" if some else "dense" for some in sparse]
    if len(set(kinds)) == 1:
        return tuple(words)
    if len(set(words)) == 1:
        return tuple(kinds)
    return tuple(f"{kind}-{word}" for kind, word in zip(kinds, words, strict=True))


def write_decoder(model: Model, t: DecoderTraits) -> dict[str, Any]:
    """Write a decoder's config; what it cannot say is found by reading it back."""
    keys = t.keys
    config: dict[str, Any] = {"architectures": [t.architecture], "model_type": t.model_type}
    set_key(config, keys.hidden, model.hidden)
    set_key(config, keys.layers, model.layers)
    set_key(config, keys.vocab, model.vocab)
    set_key(config, keys.tied, model.tied)
    if keys.positions:
        set_key(config, keys.positions, model.max_positions)
    if keys.eps:
        set_key(config, keys.eps, model.norm.eps)
    write_flag(config, t.head_bias, model.head_bias)
    write_mixers(config, t, model)
    write_mlps(config, t, model)
    if t.parallel is not None:
        set_key(config, t.parallel[0].key, model.layer_blocks()[0].norms == t.parallel[1])
    for key, value in (
        (t.embedding_scale_key, model.embedding_scale),
        (t.logit_scale[0], model.logit_scale),
        (t.logit_softcap[0], model.logit_softcap),
        (t.same_as_hidden, model.hidden),
    ):
        if key:
            set_key(config, key, value)
    if t.multi_token is not None:
        depth = model.multi_token.depth if model.multi_token is not None else 0
        set_key(config, "num_nextn_predict_layers", depth)
    for key, value in t.fixed.items():
        set_key(config, key, value)
    return config
