"""Families of dense decoders in Llama's shape, as tables of names."""

from collections.abc import Sequence

from meshwright.run.nn.huggingface.family import Family, Table, joined
from meshwright.run.nn.huggingface.links import Grouped, Site
from meshwright.spec.model import Attention


def attention(site: Site) -> Attention:
    """Return the attention of a layer that has one."""
    mixer = site.block.mixer if site.block is not None else None
    assert isinstance(mixer, Attention)
    return mixer


def qkv_rows(site: Site) -> Sequence[int]:
    """Return the rows of queries, keys and values."""
    mixer = attention(site)
    keys = mixer.kv_heads * mixer.head_dim
    return mixer.heads * mixer.head_dim, keys, keys


def qkv_groups(site: Site) -> Sequence[int]:
    """Return the groups of heads that share keys, then a group's rows of each kind."""
    mixer = attention(site)
    queries = mixer.heads // mixer.kv_heads * mixer.head_dim
    return mixer.kv_heads, queries, mixer.head_dim, mixer.head_dim


QKV = joined("self_attn.q_proj.*", "self_attn.k_proj.*", "self_attn.v_proj.*", sizes=qkv_rows)

OUTSIDE: Table = {
    "embedding.*": "model.embed_tokens.*",
    "final_norm.*": "model.norm.*",
}

INSIDE: Table = {
    "norm_mixer.*": "input_layernorm.*",
    "mixer.qkv.*": QKV,
    "mixer.q_norm.*": "self_attn.q_norm.*",
    "mixer.k_norm.*": "self_attn.k_norm.*",
    "mixer.o.*": "self_attn.o_proj.*",
    "norm_mlp.*": "post_attention_layernorm.*",
    "mlp.gate_up.*": joined("mlp.gate_proj.*", "mlp.up_proj.*"),
    "mlp.up.*": "mlp.up_proj.*",
    "mlp.down.*": "mlp.down_proj.*",
}

LLAMA = Family(OUTSIDE, INSIDE)

_AFTER: Table = {
    "norm_mixer_after.*": "post_attention_layernorm.*",
    "norm_mlp.*": "pre_feedforward_layernorm.*",
    "norm_mlp_after.*": "post_feedforward_layernorm.*",
}
"""Gemma 2 and 3 norm before and after each part, OLMo 2 and 3 only after."""

_FUSED: Table = {
    "mixer.qkv.*": "self_attn.qkv_proj.*",
    "mlp.gate_up.*": "mlp.gate_up_proj.*",
}

_PHI: Table = {"mixer.o.*": "self_attn.dense.*", "mlp.up.*": "mlp.fc1.*", "mlp.down.*": "mlp.fc2.*"}

_STARCODER: Table = {"mlp.up.*": "mlp.c_fc.*", "mlp.down.*": "mlp.c_proj.*"}

_INTERNLM2: Table = {
    "norm_mixer.*": "attention_norm.*",
    "mixer.qkv.*": Grouped("attention.wqkv.*", qkv_groups),
    "mixer.o.*": "attention.wo.*",
    "norm_mlp.*": "ffn_norm.*",
    "mlp.gate_up.*": joined("feed_forward.w1.*", "feed_forward.w3.*"),
    "mlp.down.*": "feed_forward.w2.*",
}

DENSE: dict[str, Family] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo", "cohere", "stablelm", "nemotron",
         "internlm"),
        LLAMA,
    ),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "olmo2", "olmo3"), LLAMA._replace(inside={**INSIDE, **_AFTER})
    ),
    "phi3": LLAMA._replace(inside={**INSIDE, **_FUSED}),
    "phi": LLAMA._replace(
        outside={**OUTSIDE, "final_norm.*": "model.final_layernorm.*"}, inside={**INSIDE, **_PHI}
    ),
    "starcoder2": LLAMA._replace(inside={**INSIDE, **_STARCODER}),
    "internlm2": LLAMA._replace(
        outside={**OUTSIDE, "embedding.*": "model.tok_embeddings.*"},
        inside=_INTERNLM2,
        head="output",
    ),
}  # fmt: skip
