"""Small configs of each family, drawn at random from a seed: what its models differ in, varied."""

from collections.abc import Callable
from random import Random
from typing import Any

Config = dict[str, Any]


def _sizes(random: Random) -> Config:
    heads = random.choice((4, 6))
    return {
        "hidden_size": 8 * heads,
        "num_hidden_layers": random.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice((1, 2, heads)),
        "intermediate_size": random.choice((40, 64)),
        "vocab_size": random.choice((96, 130)),
        "max_position_embeddings": 32,
        "tie_word_embeddings": random.random() < 0.4,
        "rope_theta": random.choice((10_000.0, 500.0)),
    }


def _head_dim(random: Random) -> Config:
    """Heads need not make up the width."""
    return {"head_dim": random.choice((8, 16))}


def _stretched(random: Random) -> Config:
    rule = random.choice(("none", "linear", "dynamic", "llama3", "yarn"))
    scaling: Config = {"rope_type": rule, "factor": random.choice((2.0, 4.0))}
    original = {"original_max_position_embeddings": 16}
    match rule:
        case "none":
            return {}
        case "llama3":
            scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}
        case "yarn":
            scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, **original}
    return {"rope_scaling": scaling}


def _flag(random: Random) -> bool:
    return random.random() < 0.5


def _window(random: Random) -> int | None:
    return random.choice((None, 5, 9))


def _llama(random: Random) -> Config:
    return {
        **_sizes(random),
        **_head_dim(random),
        **_stretched(random),
        "attention_bias": _flag(random),
        "mlp_bias": _flag(random),
        "rms_norm_eps": random.choice((1e-5, 1e-3)),
    }


def _mistral(random: Random) -> Config:
    return {**_sizes(random), **_head_dim(random), "sliding_window": _window(random)}


def _upper_window(random: Random) -> Config:
    return {
        "use_sliding_window": _flag(random),
        "sliding_window": 6,
        "max_window_layers": random.choice((0, 1)),
    }


def _qwen2(random: Random) -> Config:
    return {**_sizes(random), **_upper_window(random), **_stretched(random)}


def _qwen3(random: Random) -> Config:
    config = {**_sizes(random), **_head_dim(random), **_upper_window(random)}
    return {**config, "attention_bias": _flag(random)}


def _mixtral(random: Random) -> Config:
    return {
        **_sizes(random),
        "sliding_window": _window(random),
        "num_local_experts": random.choice((4, 6)),
        "num_experts_per_tok": random.choice((1, 2, 3)),
    }


def _routed(random: Random) -> Config:
    return {
        "num_experts": random.choice((4, 6)),
        "num_experts_per_tok": random.choice((1, 2, 3)),
        "moe_intermediate_size": random.choice((16, 24)),
        "norm_topk_prob": _flag(random),
        "decoder_sparse_step": random.choice((1, 2)),
        "mlp_only_layers": random.choice(([], [0])),
    }


def _qwen2_moe(random: Random) -> Config:
    return {
        **_sizes(random),
        **_routed(random),
        "shared_expert_intermediate_size": 24,
        "qkv_bias": _flag(random),
    }


def _qwen3_moe(random: Random) -> Config:
    config = {**_sizes(random), **_head_dim(random), **_routed(random)}
    return {**config, "attention_bias": _flag(random)}


def _latent(random: Random) -> Config:
    sizes = _sizes(random)
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": random.choice((0.707, 1.0)), "original_max_position_embeddings": 16,
    }  # fmt: skip
    return {
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"],
        "q_lora_rank": random.choice((None, 24)),
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": random.choice((4, 8)),
        "v_head_dim": random.choice((8, 12)),
        "attention_bias": _flag(random),
        "n_routed_experts": 8,
        "num_experts_per_tok": random.choice((1, 2, 3)),
        "n_shared_experts": random.choice((1, 2)),
        "moe_intermediate_size": 16,
        "first_k_dense_replace": random.choice((0, 1)),
        "routed_scaling_factor": random.choice((1.0, 2.5)),
        "norm_topk_prob": _flag(random),
        **({"rope_scaling": yarn} if _flag(random) else {}),
    }


def _deepseek_v2(random: Random) -> Config:
    grouped = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    plain = {"topk_method": "greedy"}
    # Its class ignores the switch and never normalises.
    return {**_latent(random), **random.choice((grouped, plain)), "norm_topk_prob": False}


def _deepseek_v3(random: Random) -> Config:
    groups = random.choice(((1, 1), (4, 2)))
    return {
        **_latent(random),
        "n_group": groups[0],
        "topk_group": groups[1],
        "rope_interleave": _flag(random),
    }


def _gemma(random: Random) -> Config:
    return {
        **_sizes(random),
        **_head_dim(random),
        "attention_bias": _flag(random),
        "tie_word_embeddings": True,
    }


def _kinds(random: Random, layers: int) -> list[str]:
    return random.choices(("sliding_attention", "full_attention"), k=layers)


def _gemma2(random: Random) -> Config:
    config = _gemma(random)
    return {
        **config,
        "layer_types": _kinds(random, config["num_hidden_layers"]),
        "sliding_window": 6,
        "query_pre_attn_scalar": random.choice((8, 20)),
        "attn_logit_softcapping": random.choice((None, 3.0)),
        "final_logit_softcapping": random.choice((None, 5.0)),
    }


def _gemma3(random: Random) -> Config:
    # Its class reads the cap of the scores and does not use it.
    config = {**_gemma2(random), "attn_logit_softcapping": None}
    return {**config, "rope_local_base_freq": 1000.0, **random.choice(
        ({}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    )}  # fmt: skip


def _gpt_oss(random: Random) -> Config:
    sizes = _sizes(random)
    return {
        **sizes,
        **_head_dim(random),
        "layer_types": _kinds(random, sizes["num_hidden_layers"]),
        "sliding_window": 6,
        "num_local_experts": random.choice((4, 6)),
        "num_experts_per_tok": random.choice((1, 2, 3)),
        "attention_bias": True,
        "tie_word_embeddings": False,
    }


def _phi3(random: Random) -> Config:
    # Its padding token is number 32000, whatever the vocabulary.
    config = {**_sizes(random), "sliding_window": _window(random), "vocab_size": 32_064}
    if _flag(random):
        return config
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    stretched = {"rope_scaling": {"rope_type": "longrope", **factors}}
    return {**config, **stretched, "original_max_position_embeddings": random.choice((16, 64))}


def _phi(random: Random) -> Config:
    return {**_sizes(random), "partial_rotary_factor": 0.5, "tie_word_embeddings": False}


def _olmo(random: Random) -> Config:
    return {
        **_sizes(random),
        "clip_qkv": random.choice((None, 0.5)),
        "attention_bias": _flag(random),
    }


def _olmo2(random: Random) -> Config:
    return {**_sizes(random), "attention_bias": _flag(random)}


def _olmo3(random: Random) -> Config:
    sizes = _sizes(random)
    # The two kinds of layer have one base, which is the class's own unless both are told.
    del sizes["rope_theta"]
    kinds = _kinds(random, sizes["num_hidden_layers"])
    return {**sizes, "layer_types": kinds, "sliding_window": 6}


def _olmoe(random: Random) -> Config:
    return {
        **_sizes(random),
        "num_experts": 4,
        "num_experts_per_tok": random.choice((1, 2)),
        "norm_topk_prob": _flag(random),
        "clip_qkv": random.choice((None, 0.5)),
    }


def _gpt2(random: Random) -> Config:
    return {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": random.choice((2, 4)),
        "n_inner": random.choice((None, 48)),
        "n_positions": 64,
        "vocab_size": 96,
    }


def _gpt_neox(random: Random) -> Config:
    sizes = _sizes(random)
    del sizes["num_key_value_heads"]
    return {
        **sizes,
        "use_parallel_residual": _flag(random),
        "attention_bias": _flag(random),
        "rotary_pct": random.choice((0.25, 0.5, 1.0)),
    }


def _starcoder2(random: Random) -> Config:
    return {**_sizes(random), "use_bias": _flag(random), "sliding_window": _window(random)}


def _glm4_moe(random: Random) -> Config:
    return {
        **_sizes(random),
        **_head_dim(random),
        "attention_bias": _flag(random),
        "use_qk_norm": _flag(random),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": random.choice((0, 1)),
        "n_group": 2,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
    }


def _qwen3_next(random: Random) -> Config:
    return {
        **_sizes(random),
        **_head_dim(random),
        **_routed(random),
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 24,
        "partial_rotary_factor": random.choice((0.25, 0.5)),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": random.choice((2, 4)),
        "linear_key_head_dim": 8,
        "linear_value_head_dim": random.choice((8, 12)),
        "linear_conv_kernel_dim": random.choice((2, 4)),
    }


def _nemotron_h(random: Random) -> Config:
    sizes = _sizes(random)
    del sizes["num_hidden_layers"], sizes["rope_theta"]
    return {
        **sizes,
        **_head_dim(random),
        "hybrid_override_pattern": random.choice(("M*-E", "M-M*E", "*MEM")),
        "mamba_num_heads": random.choice((4, 8)),
        "mamba_head_dim": 8,
        "ssm_state_size": random.choice((8, 16)),
        "n_groups": random.choice((1, 2)),
        "use_conv_bias": _flag(random),
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": random.choice((None, 16)),
        "tie_word_embeddings": False,
    }


def _cohere(random: Random) -> Config:
    return {**_sizes(random), "attention_bias": _flag(random), "logit_scale": 0.5}


def _opt(random: Random) -> Config:
    sizes = _sizes(random)
    del sizes["num_key_value_heads"], sizes["rope_theta"], sizes["intermediate_size"]
    return {
        **sizes,
        "ffn_dim": 48,
        "word_embed_proj_dim": sizes["hidden_size"],
        "max_position_embeddings": 64,
        "enable_bias": _flag(random),
        "tie_word_embeddings": True,
    }


def _falcon(random: Random) -> Config:
    new = {"new_decoder_architecture": True, "num_kv_heads": 2}
    several = {"multi_query": False, "parallel_attn": _flag(random)}
    return {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "bias": _flag(random),
        **random.choice((new, several, {})),
    }


def _bloom(random: Random) -> Config:
    return {"hidden_size": 48, "n_layer": 2, "n_head": random.choice((4, 6)), "vocab_size": 96}


def _mpt(random: Random) -> Config:
    heads = random.choice((4, 8))
    return {"d_model": 32, "n_layers": 2, "n_heads": heads, "vocab_size": 96, "max_seq_len": 64}


def _dbrx(random: Random) -> Config:
    attention = {"kv_n_heads": random.choice((1, 2)), "clip_qkv": random.choice((0.5, 8.0))}
    experts = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": random.choice((1, 2))}
    return {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 96,
        "max_seq_len": 64,
        "attn_config": {**attention, "rope_theta": 500.0},
        "ffn_config": experts,
    }


def _nemotron(random: Random) -> Config:
    return {**_sizes(random), "attention_bias": _flag(random), "partial_rotary_factor": 0.5}


def _stablelm(random: Random) -> Config:
    return {
        **_sizes(random),
        "use_qkv_bias": _flag(random),
        "use_parallel_residual": _flag(random),
        "partial_rotary_factor": 0.5,
    }


DRAWS: dict[str, Callable[[Random], Config]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "phi3": _phi3,
    "phi": _phi,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "starcoder2": _starcoder2,
    "glm4_moe": _glm4_moe,
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "cohere": _cohere,
    "opt": _opt,
    "falcon": _falcon,
    "bloom": _bloom,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "dbrx": _dbrx,
    "stablelm": _stablelm,
}


def draw(family: str, seed: int) -> Config:
    """Draw a small config of a family; equal seeds give equal configs."""
    return DRAWS[family](Random(f"{family} {seed}"))
