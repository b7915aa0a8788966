"""Families in GPT's shape, with plain MLPs, layer norms and biases, as traits."""

from meshwright.spec.model.block import NormSpec
from meshwright.spec.model.huggingface.family_traits import ConfigFlag, DecoderTraits, SizeKeys

_LAYER_NORM = NormSpec(kind="layer", bias=True)
_BIAS = ConfigFlag("enable_bias", True)

GPT = (
    DecoderTraits(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        hidden=768, layers=12, heads=12, ffn=None, vocab=50257, max_positions=1024, eps=1e-5,
        tied=True,
        keys=SizeKeys(
            hidden="n_embd|hidden_size", layers="n_layer|num_hidden_layers",
            heads="n_head|num_attention_heads", kv_heads="", head_dim="", ffn="n_inner",
            positions="n_positions|max_position_embeddings", eps="layer_norm_epsilon",
            activation="activation_function",
        ),
        norm=_LAYER_NORM,
        qkv_bias=True, out_bias=True, mlp_bias=True,
        gated=False, activation="gelu_new",
        positions="learned",
        fixed={
            "add_cross_attention": False,
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
        },
    ),
    DecoderTraits(
        model_type="opt",
        architecture="OPTForCausalLM",
        hidden=768, layers=12, heads=12, ffn=3072, vocab=50272, eps=1e-5, tied=True,
        keys=SizeKeys(
            kv_heads="", head_dim="", ffn="ffn_dim", eps="", activation="activation_function"
        ),
        norm=_LAYER_NORM,
        qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=_BIAS,
        gated=False, activation="relu",
        positions="learned", position_offset=2,
        same_as_hidden="word_embed_proj_dim",
        fixed={
            "_remove_final_layer_norm": False,
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
    DecoderTraits(
        model_type="bloom",
        architecture="BloomForCausalLM",
        hidden=64, layers=2, heads=8, ffn=None, vocab=250880, eps=1e-5, tied=True,
        keys=SizeKeys(
            hidden="hidden_size|n_embed", layers="n_layer|num_hidden_layers",
            heads="n_head|num_attention_heads", kv_heads="", head_dim="", ffn="",
            positions="seq_length", eps="layer_norm_epsilon", activation="",
        ),
        norm=_LAYER_NORM,
        embedding_norm=True,
        qkv_bias=True, out_bias=True, mlp_bias=True,
        gated=False, activation="gelu_pytorch_tanh",
        positions="alibi",
        fixed={"apply_residual_connection_post_layernorm": False},
    ),
    DecoderTraits(
        model_type="mpt",
        architecture="MptForCausalLM",
        hidden=2048, layers=24, heads=16, vocab=50368, eps=1e-5, tied=True,
        keys=SizeKeys(
            hidden="d_model|hidden_size", layers="n_layers|num_hidden_layers",
            heads="n_heads|num_attention_heads", kv_heads="", head_dim="",
            positions="max_seq_len", eps="layer_norm_epsilon", activation="",
            ffn_ratio="expansion_ratio",
        ),
        norm=NormSpec(kind="layer"),
        gated=False, activation="gelu",
        positions="alibi",
        clip_key="attn_config.clip_qkv",
        fixed={
            "attn_config.alibi": True,
            "attn_config.alibi_bias_max": 8,
            "attn_config.attn_type": "multihead_attention",
            "attn_config.prefix_lm": False,
            "attn_config.qk_ln": False,
            "attn_config.softmax_scale": None,
            "logit_scale": None,
            "no_bias": True,
        },
    ),
    DecoderTraits(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        hidden=6144, layers=44, heads=64, ffn=24576, vocab=50432, eps=1e-5,
        keys=SizeKeys(
            kv_heads="", head_dim="", eps="layer_norm_eps",
            theta="rotary_emb_base|rope_theta", fraction="rotary_pct|partial_rotary_factor",
        ),
        norm=_LAYER_NORM,
        parallel=(ConfigFlag("use_parallel_residual", True), "parallel"),
        qkv_bias=ConfigFlag("attention_bias", True), out_bias=ConfigFlag("attention_bias", True),
        mlp_bias=True,
        gated=False, activation="gelu",
        fraction=0.25,
    ),
)  # fmt: skip
