"""One reader and one writer for every family of decoders that `Traits` can describe."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.spec.model.block import Block
from meshwright.spec.model.feedforward import Experts, FeedForward, Mlp
from meshwright.spec.model.huggingface.attention import (
    read_kinds,
    read_mixer,
    read_switch,
    write_mixers,
    write_switch,
)
from meshwright.spec.model.huggingface.experts import read_mlp, read_sparse, write_mlps
from meshwright.spec.model.huggingface.fields import Fields, put
from meshwright.spec.model.huggingface.traits import Traits
from meshwright.spec.model.mixers import Attention, GatedDelta, LatentAttention, Mixer
from meshwright.spec.model.model import Model, MultiToken
from meshwright.spec.model.pattern import MOST_LAYERS, compress


def read_decoder(fields: Fields, t: Traits) -> Model:
    """Read a decoder's config, or raise every fault in it at once."""
    sizes = _sizes(fields, t)
    kinds = read_kinds(fields, t, sizes["layers"])
    sparse = read_sparse(fields, t, sizes["layers"])
    mixers = {kind: read_mixer(fields, t, sizes, kind) for kind in sorted(set(kinds))}
    mlps = {some: read_mlp(fields, t, sizes["hidden"], some) for some in sorted(set(sparse))}
    values = _around(fields, t, sizes["hidden"])
    place = t.place
    if t.parallel is not None and fields.flag(*t.parallel[0]):
        place = t.parallel[1]
    heads = 0
    if t.multi_token is not None:
        heads = fields.whole("num_nextn_predict_layers", t.multi_token, least=0)
    fields.check()
    names = _layer_names(kinds, sparse)
    blocks = {
        name: Block(
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
        pattern=compress(names),
        multi_token=MultiToken(depth=heads, block=names[-1]) if heads else None,
        **values,
    )


def _sizes(fields: Fields, t: Traits) -> dict[str, int]:
    keys = t.keys
    # Any of them may rest on the class's default (Llava leaves out all but one), but not all.
    fields.some_of(keys.hidden, keys.heads, keys.ffn, keys.vocab)
    hidden = fields.whole(keys.hidden, t.hidden)
    heads = fields.whole(keys.heads, t.heads)
    sizes = {
        "hidden": hidden,
        "heads": heads,
        "layers": fields.whole(keys.layers, t.layers, most=MOST_LAYERS),
        "vocab": fields.whole(keys.vocab, t.vocab),
    }
    if t.latent:
        # Every head has its own keys and values, rebuilt from the latent.
        if fields.has(keys.kv_heads):
            fields.fixed(keys.kv_heads, heads)
        return sizes
    kv_heads = t.kv_heads
    if keys.kv_heads:
        kv_heads = fields.maybe_whole(keys.kv_heads, t.kv_heads)
    kv_heads = kv_heads if kv_heads is not None else heads
    if heads % kv_heads:
        fields.fault(keys.kv_heads, f"{kv_heads} does not divide {keys.heads}={heads}",
                     f"use {math.gcd(heads, kv_heads)}")  # fmt: skip
        kv_heads = heads
    head_dim = fields.maybe_whole(keys.head_dim, t.head_dim) if keys.head_dim else None
    if head_dim is None:
        if hidden % heads:
            fields.fault(keys.heads, f"{heads} does not divide {keys.hidden}={hidden}",
                         f"set {keys.head_dim}" if keys.head_dim
                         else f"use {math.gcd(hidden, heads)}")  # fmt: skip
        head_dim = max(1, hidden // heads)
    return {**sizes, "kv_heads": kv_heads, "head_dim": head_dim}


def _around(fields: Fields, t: Traits, hidden: int) -> dict[str, Any]:
    """Read what surrounds the layers."""
    keys = t.keys
    eps = fields.number(keys.eps, t.eps) if keys.eps else t.eps
    if eps < 0:
        fields.fault(keys.eps, f"{eps!r} is negative", "1e-5")
    for key, value in t.fixed.items():
        fields.fixed(key, value)
    if t.same_as_hidden:
        fields.fixed(t.same_as_hidden, hidden)
    scale = math.sqrt(hidden) if t.sqrt_embedding else None
    if t.embedding_scale_key:
        scale = fields.maybe_number(t.embedding_scale_key)
    positions = fields.whole(keys.positions, t.max_positions) if keys.positions else t.max_positions
    return {
        "norm": msgspec.structs.replace(t.norm, eps=max(eps, 0.0)),
        "tied": fields.flag(keys.tied, t.tied),
        "head_bias": read_switch(fields, t.head_bias),
        "positions": t.positions,
        "max_positions": positions,
        "position_offset": t.position_offset,
        "embedding_norm": t.embedding_norm,
        "embedding_scale": scale,
        "logit_scale": fields.maybe_number(*t.logit_scale) if t.logit_scale[0] else None,
        "logit_softcap": fields.maybe_number(*t.logit_softcap) if t.logit_softcap[0] else None,
    }


def _mixer(t: Traits, kind: str, values: dict[str, Any]) -> Mixer:
    if kind == "linear":
        return GatedDelta(**values)
    return LatentAttention(**values) if t.latent else Attention(**values)


def _mlp(sparse: bool, values: dict[str, Any]) -> FeedForward:
    return Experts(**values) if sparse else Mlp(**values)


def _layer_names(kinds: Sequence[str], sparse: Sequence[bool]) -> tuple[str, ...]:
    """Name each layer by what sets it apart: `dense`, `moe`, `local`, `global-moe`."""
    words = ["moe" if some else "dense" for some in sparse]
    if len(set(kinds)) == 1:
        return tuple(words)
    if len(set(words)) == 1:
        return tuple(kinds)
    return tuple(f"{kind}-{word}" for kind, word in zip(kinds, words, strict=True))


def write_decoder(model: Model, t: Traits) -> dict[str, Any]:
    """Write a decoder's config; what it cannot say is found by reading it back."""
    keys = t.keys
    config: dict[str, Any] = {"architectures": [t.architecture], "model_type": t.model_type}
    put(config, keys.hidden, model.hidden)
    put(config, keys.layers, model.layers)
    put(config, keys.vocab, model.vocab)
    put(config, keys.tied, model.tied)
    if keys.positions:
        put(config, keys.positions, model.max_positions)
    if keys.eps:
        put(config, keys.eps, model.norm.eps)
    write_switch(config, t.head_bias, model.head_bias)
    write_mixers(config, t, model)
    write_mlps(config, t, model)
    if t.parallel is not None:
        put(config, t.parallel[0].key, model.layer_blocks()[0].norms == t.parallel[1])
    for key, value in (
        (t.embedding_scale_key, model.embedding_scale),
        (t.logit_scale[0], model.logit_scale),
        (t.logit_softcap[0], model.logit_softcap),
        (t.same_as_hidden, model.hidden),
    ):
        if key:
            put(config, key, value)
    if t.multi_token is not None:
        depth = model.multi_token.depth if model.multi_token is not None else 0
        put(config, "num_nextn_predict_layers", depth)
    for key, value in t.fixed.items():
        put(config, key, value)
    return config
