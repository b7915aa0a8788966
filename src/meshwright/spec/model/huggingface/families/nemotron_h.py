"""Nemotron-H: layers of one part each, Mamba-2, attention, MLP or experts, in a free order."""

import math
from typing import Any

from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.feedforward import FeedForward, MLPSpec, MoESpec
from meshwright.spec.model.huggingface.config_fields import ConfigFields, activation_key
from meshwright.spec.model.layer_pattern import MAX_LAYERS, compress_pattern
from meshwright.spec.model.model import Model, MtpSpec
from meshwright.spec.model.token_mixers import AttentionSpec, Mamba2Spec, Mixer
from meshwright.spec.serialization import format_value

MODEL_TYPE = "nemotron_h"

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WORDS = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_AHEAD = "ahead"


def read_nemotron_h(fields: ConfigFields) -> Model:
    """Read a Nemotron-H config."""
    fields.require_any("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    names = _layers(fields)
    eps = fields.number("layer_norm_epsilon|norm_eps|rms_norm_eps", 1e-5)
    if eps < 0:
        fields.add_problem("layer_norm_epsilon", f"{eps!r} is negative", "1e-5")
    depth = fields.integer("num_nextn_predict_layers", 0, least=0)
    wanted = dict.fromkeys(names)
    if depth:
        wanted.update(attention=None, moe=None)
        _check_ahead(fields)
    values = {name: _READERS[name](fields) for name in wanted}
    hidden = fields.integer("hidden_size", 4096)
    vocab = fields.integer("vocab_size", 131072)
    tied = fields.flag("tie_word_embeddings", False)
    positions = fields.integer("max_position_embeddings", 4096)
    fields.raise_problems()
    parts = {name: _CLASSES[name](**values[name]) for name in wanted}
    blocks = [_block(name, parts[name]) for name in dict.fromkeys(names)]
    if depth:
        # A head runs an attention layer and a layer of experts, which is one block of both.
        blocks.append(BlockSpec(name=_AHEAD, mixer=parts["attention"], mlp=parts["moe"]))
    return Model(
        name=MODEL_TYPE,
        family=MODEL_TYPE,
        hidden=hidden,
        vocab=vocab,
        blocks=tuple(blocks),
        pattern=compress_pattern(names),
        norm=NormSpec(eps=eps),
        tied=tied,
        positions="none",
        max_positions=positions,
        multi_token=MtpSpec(depth=depth, block=_AHEAD) if depth else None,
    )


def _layers(fields: ConfigFields) -> tuple[str, ...]:
    words = fields.list_items("layers_block_type|layer_types", most=MAX_LAYERS)
    if words is not None:
        key, items, names = "layers_block_type|layer_types", words, _WORDS
    else:
        key, names = "hybrid_override_pattern", _LETTERS
        if not fields.has(key):
            fields.add_problem(key, "is missing", "such as M-M*-")
            return ("mlp",)
        items = list(fields.text(key)[: MAX_LAYERS + 1])
    for index, item in enumerate(items):
        if not isinstance(item, str) or item not in names:
            known = ", ".join(names)
            fields.add_problem(
                key, f"{format_value(item)} at {index} is not one of {known}", "mend it"
            )
            return ("mlp",)
    if not items or len(items) > MAX_LAYERS:
        fields.add_problem(key, f"has {len(items)} layers, not 1 to {MAX_LAYERS}", "such as M-M*-")
        return ("mlp",)
    if fields.has("num_hidden_layers"):
        fields.require_value("num_hidden_layers", len(items))
    return tuple(names[str(item)] for item in items)


def _check_ahead(fields: ConfigFields) -> None:
    fields.require_value("mtp_hybrid_override_pattern", "*E")
    words = fields.list_items("mtp_layers_block_type")
    if words is not None and [_WORDS.get(str(word)) for word in words] != ["attention", "moe"]:
        fields.add_problem("mtp_layers_block_type", f"{format_value(words)} is not supported",
                     "only attention then moe is")  # fmt: skip


def _attention(fields: ConfigFields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 32)
    kv_heads = fields.optional_integer("num_key_value_heads", 8) or heads
    if heads % kv_heads:
        fields.add_problem("num_key_value_heads", f"{kv_heads} does not divide {heads} heads",
                     f"use {math.gcd(heads, kv_heads)}")  # fmt: skip
    bias = fields.flag("attention_bias", False)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": fields.integer("head_dim|attention_head_dim", 128),
        "qkv_bias": bias,
        "out_bias": bias,
        "window": fields.optional_integer("sliding_window"),
    }


def _mamba(fields: ConfigFields) -> dict[str, Any]:
    fields.require_value("mamba_hidden_act", "silu")
    return {
        "heads": fields.integer("mamba_num_heads", 128),
        "head_dim": fields.integer("mamba_head_dim", 64),
        "state_dim": fields.integer("ssm_state_size", 128),
        "groups": fields.integer("n_groups|mamba_n_groups", 8),
        "conv_width": fields.integer("conv_kernel|mamba_d_conv", 4),
        "conv_bias": fields.flag("use_conv_bias|mamba_conv_bias", True),
        "bias": fields.flag("mamba_proj_bias", False) or fields.flag("use_bias", False),
    }


def _mlp(fields: ConfigFields) -> dict[str, Any]:
    return {
        "width": fields.integer("intermediate_size", 21504),
        "gated": False,
        "activation": fields.activation("mlp_hidden_act", "relu2"),
        "bias": fields.flag("mlp_bias", False),
    }


def _moe(fields: ConfigFields) -> dict[str, Any]:
    fields.require_value("mlp_bias", value=False)
    shared = fields.integer("n_shared_experts", 1, least=0)
    width = fields.integer("moe_shared_expert_intermediate_size", 7688)
    if shared > 1:
        fields.add_problem("n_shared_experts", f"{shared} is not supported", "0 and 1 are")
    count, top_k = fields.integer("n_routed_experts", 8), fields.integer("num_experts_per_tok", 2)
    groups, used = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if top_k > count:
        fields.add_problem("num_experts_per_tok", f"{top_k} is more than n_routed_experts={count}",
                     f"use at most {count}")  # fmt: skip
    if used > groups:
        fields.add_problem("topk_group", f"{used} is more than n_group={groups}", str(groups))
    return {
        "count": count,
        "top_k": top_k,
        "width": fields.integer("moe_intermediate_size", 7688),
        "shared_width": width if shared else 0,
        "gated": False,
        "activation": fields.activation("mlp_hidden_act", "relu2"),
        "router_bias": "balance",
        "scoring": "sigmoid",
        "normalise": fields.flag("norm_topk_prob", True),
        "scale": fields.number("routed_scaling_factor", 1.0),
        "groups": groups,
        "groups_used": used,
        "latent": fields.optional_integer("moe_latent_size"),
    }


_READERS = {"attention": _attention, "mamba": _mamba, "mlp": _mlp, "moe": _moe}
_CLASSES: dict[str, Any] = {
    "attention": AttentionSpec,
    "mamba": Mamba2Spec,
    "mlp": MLPSpec,
    "moe": MoESpec,
}


def _block(name: str, part: Mixer | FeedForward) -> BlockSpec:
    if isinstance(part, MLPSpec | MoESpec):
        return BlockSpec(name=name, mlp=part)
    return BlockSpec(name=name, mixer=part)


def write_nemotron_h(model: Model) -> dict[str, Any]:
    """Write a Nemotron-H config; what it cannot say is found by reading it back."""
    letters = {ours: letter for letter, ours in _LETTERS.items()}
    names = [_kind(block) for block in model.layer_blocks()]
    config: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": MODEL_TYPE,
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "num_hidden_layers": model.layers,
        "hybrid_override_pattern": "".join(letters[name] for name in names),
        "max_position_embeddings": model.max_positions,
        "layer_norm_epsilon": model.norm.eps,
        "tie_word_embeddings": model.tied,
        "num_nextn_predict_layers": model.multi_token.depth if model.multi_token else 0,
    }
    if model.multi_token is not None:
        config["mtp_hybrid_override_pattern"] = "*E"
    for block in model.blocks:
        _write_mixer(config, block.mixer)
        _write_mlp(config, block.mlp)
    return config


def _kind(block: BlockSpec) -> str:
    if isinstance(block.mixer, Mamba2Spec):
        return "mamba"
    if block.mixer is not None:
        return "attention"
    return "moe" if isinstance(block.mlp, MoESpec) else "mlp"


def _write_mixer(config: dict[str, Any], mixer: Mixer | None) -> None:
    if isinstance(mixer, Mamba2Spec):
        config |= {
            "mamba_hidden_act": "silu",
            "mamba_num_heads": mixer.heads,
            "mamba_head_dim": mixer.head_dim,
            "ssm_state_size": mixer.state_dim,
            "n_groups": mixer.groups,
            "conv_kernel": mixer.conv_width,
            "use_conv_bias": mixer.conv_bias,
            "mamba_proj_bias": mixer.bias,
            "use_bias": mixer.bias,
        }
    elif isinstance(mixer, AttentionSpec):
        config |= {
            "num_attention_heads": mixer.heads,
            "num_key_value_heads": mixer.kv_heads,
            "head_dim": mixer.head_dim,
            "attention_bias": mixer.qkv_bias,
            "sliding_window": mixer.window,
        }


def _write_mlp(config: dict[str, Any], mlp: FeedForward | None) -> None:
    if mlp is not None:
        config["mlp_hidden_act"] = activation_key(mlp.activation, "relu2")
        config["mlp_bias"] = mlp.bias
    if isinstance(mlp, MLPSpec):
        config["intermediate_size"] = mlp.width
    elif isinstance(mlp, MoESpec):
        config |= {
            "n_routed_experts": mlp.count,
            "num_experts_per_tok": mlp.top_k,
            "moe_intermediate_size": mlp.width,
            "n_shared_experts": int(mlp.shared_width > 0),
            "moe_shared_expert_intermediate_size": max(mlp.shared_width, 1),
            "moe_latent_size": mlp.latent,
            "norm_topk_prob": mlp.normalise,
            "routed_scaling_factor": mlp.scale,
            "n_group": mlp.groups,
            "topk_group": mlp.groups_used,
        }
