"""The model of a published run, from the dimensions its row prints.

Rows print shapes, not architectures: what they leave open (norms, biases, positions) follows the
usual decoder of that shape. A hybrid model whose row prints no dimensions is looked up in the
catalog by name.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from meshwright.errors import InputError
from meshwright.spec import catalog
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    FeedForward,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    MLPSpec,
    Model,
    MoESpec,
    MtpSpec,
    NormSpec,
    Rotary,
)
from meshwright.spec.model.layer_pattern import compress_pattern


class UnusableRowError(Exception):
    """A row that cannot be predicted, with the reason."""


def read_model(row: Mapping[str, Any]) -> Model:
    """Return the model that a row describes."""
    given = row["model"]
    hybrid = given.get("hybrid")
    if hybrid is not None:
        return _hybrid(given, hybrid)
    if not given.get("layers") or not given.get("hidden") or not given.get("heads"):
        return _named(given["name"])
    blocks = _blocks(given)
    described = _model(given, blocks, _layer_names(given, blocks))
    return _known(described) or described


def _known(described: Model) -> Model | None:
    """Return the catalog's model of that name where its sizes are those of the row."""
    known = _listed(described.name)
    if known is None or _sizes(known) != _sizes(described):
        return None
    return known if known.multi_token == described.multi_token else None


def _sizes(model: Model) -> tuple[object, ...]:
    """Return what a row prints of a model."""
    mixers = {
        (block.mixer.heads, block.mixer.kv_heads, block.mixer.head_dim, block.mixer.window)
        for block in model.blocks
        if isinstance(block.mixer, AttentionSpec)
    }
    experts = {
        (block.mlp.count, block.mlp.top_k, block.mlp.width, block.mlp.shared_width)
        for block in model.blocks
        if isinstance(block.mlp, MoESpec)
    }
    return model.layers, model.hidden, model.vocab, mixers, experts


def _named(name: str) -> Model:
    """Look a model up whose row prints no dimensions."""
    known = _listed(name)
    if known is None:
        raise UnusableRowError(f"the source prints no dimensions of {name}")
    return known


@cache  # many rows name the same, and most names are not in the catalog
def _listed(name: str) -> Model | None:
    """Return the catalog's model of a name as rows write it."""
    short = re.sub(r"\s*\(.*?\)", "", name).strip().replace(" ", "-").lower()
    for candidate in (short, re.sub(r"-\d+b-a\d+b$", "", short), re.sub(r"-\d+b$", "", short)):
        try:
            return catalog.get_model(candidate)
        except InputError:
            continue
    return None


def _model(given: Mapping[str, Any], blocks: dict[str, BlockSpec], names: tuple[str, ...]) -> Model:
    gated = bool(given.get("ffn_gated"))
    multi_token = None
    if _is_latent(given):
        # DeepSeek-style recipes train one extra prediction layer that the row's count leaves out.
        multi_token = MtpSpec(depth=1, block=names[-1])
    used = dict.fromkeys(names)
    return Model(
        name=str(given["name"]),
        family="llama" if gated else "gpt2",
        hidden=given["hidden"],
        vocab=given["vocab"],
        blocks=tuple(blocks[name] for name in used),
        pattern=compress_pattern(names),
        norm=NormSpec() if gated else NormSpec(kind="layer", bias=True),
        tied=bool(given.get("tied_embeddings")),
        positions="rotary" if gated else "alibi" if given.get("pos") == "alibi" else "learned",
        max_positions=131072 if gated else 2048,
        multi_token=multi_token,
    )


def _is_latent(given: Mapping[str, Any]) -> bool:
    return isinstance(given.get("attn"), Mapping) and given["attn"].get("type") == "mla"


def _mixer(given: Mapping[str, Any], window: int | None) -> Mixer:
    if _is_latent(given):
        shape = given["attn"]
        return LatentAttentionSpec(
            heads=given["heads"],
            q_rank=shape["q_lora_rank"],
            kv_rank=shape["kv_lora_rank"],
            nope_dim=shape["qk_nope"],
            rope_dim=shape["qk_rope"],
            value_dim=shape["v"],
            rotary=Rotary(),
        )
    gated = bool(given.get("ffn_gated"))
    return AttentionSpec(
        heads=given["heads"],
        kv_heads=given.get("kv_heads") or given["heads"],
        head_dim=given.get("head_dim") or given["hidden"] // given["heads"],
        qkv_bias=not gated,
        out_bias=not gated,
        window=window,
        rotary=Rotary() if gated else None,
    )


def _dense(given: Mapping[str, Any]) -> MLPSpec:
    gated = bool(given.get("ffn_gated"))
    return MLPSpec(
        width=given.get("ffn") or 4 * given["hidden"],
        gated=gated,
        activation="silu" if gated else "gelu",
        bias=not gated,
    )


def _experts(given: Mapping[str, Any]) -> MoESpec:
    width = given.get("expert_ffn") or given["ffn"]
    return MoESpec(
        count=given["experts"],
        top_k=given["topk"],
        width=width,
        shared_width=width * (given.get("shared_experts") or 0),
        gated=bool(given.get("ffn_gated")),
        activation="silu" if given.get("ffn_gated") else "relu2",
        router_bias="balance" if _is_latent(given) else "none",
    )


def _blocks(given: Mapping[str, Any]) -> dict[str, BlockSpec]:
    """Make every combination of window and feed-forward part that the row may use."""
    parts: dict[str, FeedForward] = {"dense": _dense(given)}
    if given.get("experts"):
        parts["moe"] = _experts(given)
    windows: dict[str, int | None] = {"": None}
    if given.get("window"):
        windows["_local"] = given["window"]
    return {
        f"{name}{suffix}": BlockSpec(name=f"{name}{suffix}", mixer=_mixer(given, window), mlp=part)
        for name, part in parts.items()
        for suffix, window in windows.items()
    }


def _layer_names(given: Mapping[str, Any], blocks: dict[str, BlockSpec]) -> tuple[str, ...]:
    layers, sparse = given["layers"], given.get("moe_layers") or 0
    if not given.get("experts"):
        sparse = 0
    if sparse and layers % sparse == 0 and sparse < layers:
        period = layers // sparse  # experts in every second layer, say
        kinds = ["moe" if (index + 1) % period == 0 else "dense" for index in range(layers)]
    else:
        kinds = ["dense"] * (layers - sparse) + ["moe"] * sparse
    every = given.get("window_every") or 0
    names = [
        f"{kind}_local" if every and index % every == 0 and f"{kind}_local" in blocks else kind
        for index, kind in enumerate(kinds)
    ]
    return tuple(names)


def _numbers(text: str) -> dict[str, int]:
    found = re.findall(r"(heads|head_dim|state|groups)\s+(\d+)", text.partition("mamba")[2])
    return {name: int(number) for name, number in found}


def _hybrid(given: Mapping[str, Any], text: str) -> Model:
    """Read `MEM*…` patterns and sums such as `54 mamba2 + 54 mlp + 10 attention layers`."""
    shape = _numbers(text)
    pattern = re.match(r"[ME*\-]{8,}", text)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (mamba2|mlp|attention)", text)}
    if not {"heads", "head_dim", "state"} <= shape.keys() or not (pattern or counts):
        return _named(given["name"])
    mamba = Mamba2Spec(
        heads=shape["heads"],
        head_dim=shape["head_dim"],
        state_dim=shape["state"],
        groups=shape.get("groups", 8),
    )
    blocks = {
        "mamba": BlockSpec(name="mamba", mixer=mamba),
        "attention": BlockSpec(name="attention", mixer=_mixer(given, None)),
        "mlp": BlockSpec(name="mlp", mlp=_dense(given)),
    }
    if given.get("experts"):
        blocks["moe"] = BlockSpec(name="moe", mlp=_experts(given))
    if pattern:
        letters = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
        names = tuple(letters[letter] for letter in pattern.group())
    else:
        names = tuple(
            name
            for word, name in (("mamba2", "mamba"), ("mlp", "mlp"), ("attention", "attention"))
            for _ in range(counts.get(word, 0))
        )
    return _model(given, blocks, names)
