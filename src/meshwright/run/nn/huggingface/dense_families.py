"""Families of dense decoders in Llama's shape, as tables of names."""

from collections.abc import Sequence

from meshwright.run.nn.huggingface.tensor_mapping import GroupInterleaved, ParameterSite
from meshwright.run.nn.huggingface.weight_map import MapEntries, WeightMap, make_stacked_tensors
from meshwright.spec.model import AttentionSpec


def get_attention_spec(site: ParameterSite) -> AttentionSpec:
    """Return the attention of a layer that has one."""
    mixer = site.block.mixer if site.block is not None else None
    assert isinstance(mixer, AttentionSpec)
    return mixer


def get_qkv_row_counts(site: ParameterSite) -> Sequence[int]:
    """Return the rows of queries, keys and values."""
    mixer = get_attention_spec(site)
    keys = mixer.kv_heads * mixer.head_dim
    return mixer.heads * mixer.head_dim, keys, keys


def get_qkv_group_rows(site: ParameterSite) -> Sequence[int]:
    """Return the groups of heads that share keys, then a group's rows of each kind."""
    mixer = get_attention_spec(site)
    queries = mixer.heads // mixer.kv_heads * mixer.head_dim
    return mixer.kv_heads, queries, mixer.head_dim, mixer.head_dim


QKV = make_stacked_tensors(
    "self_attn.q_proj.*", "self_attn.k_proj.*", "self_attn.v_proj.*", sizes=get_qkv_row_counts
)

GLOBAL_ENTRIES: MapEntries = {
    "embedding.*": "model.embed_tokens.*",
    "final_norm.*": "model.norm.*",
}

LAYER_ENTRIES: MapEntries = {
    "norm_mixer.*": "input_layernorm.*",
    "mixer.qkv.*": QKV,
    "mixer.q_norm.*": "self_attn.q_norm.*",
    "mixer.k_norm.*": "self_attn.k_norm.*",
    "mixer.o.*": "self_attn.o_proj.*",
    "norm_mlp.*": "post_attention_layernorm.*",
    "mlp.gate_up.*": make_stacked_tensors("mlp.gate_proj.*", "mlp.up_proj.*"),
    "mlp.up.*": "mlp.up_proj.*",
    "mlp.down.*": "mlp.down_proj.*",
}

LLAMA = WeightMap(GLOBAL_ENTRIES, LAYER_ENTRIES)

_AFTER: MapEntries = {
    "norm_mixer_after.*": "post_attention_layernorm.*",
    "norm_mlp.*": "pre_feedforward_layernorm.*",
    "norm_mlp_after.*": "post_feedforward_layernorm.*",
}
"""Gemma 2 and 3 norm before and after each part, OLMo 2 and 3 only after."""

_FUSED: MapEntries = {
    "mixer.qkv.*": "self_attn.qkv_proj.*",
    "mlp.gate_up.*": "mlp.gate_up_proj.*",
}

_PHI: MapEntries = {
    "mixer.o.*": "self_attn.dense.*",
    "mlp.up.*": "mlp.fc1.*",
    "mlp.down.*": "mlp.fc2.*",
}

_STARCODER: MapEntries = {"mlp.up.*": "mlp.c_fc.*", "mlp.down.*": "mlp.c_proj.*"}

_INTERNLM2: MapEntries = {
    "norm_mixer.*": "attention_norm.*",
    "mixer.qkv.*": GroupInterleaved("attention.wqkv.*", get_qkv_group_rows),
    "mixer.o.*": "attention.wo.*",
    "norm_mlp.*": "ffn_norm.*",
    "mlp.gate_up.*": make_stacked_tensors("feed_forward.w1.*", "feed_forward.w3.*"),
    "mlp.down.*": "feed_forward.w2.*",
}

DENSE: dict[str, WeightMap] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo", "cohere", "stablelm", "nemotron",
         "internlm"),
        LLAMA,
    ),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "olmo2", "olmo3"), LLAMA._replace(layer_entries={**LAYER_ENTRIES,
        **_AFTER})
    ),
    "phi3": LLAMA._replace(layer_entries={**LAYER_ENTRIES, **_FUSED}),
    "phi": LLAMA._replace(
        global_entries={**GLOBAL_ENTRIES, "final_norm.*": "model.final_layernorm.*"},
        layer_entries={**LAYER_ENTRIES, **_PHI}
    ),
    "starcoder2": LLAMA._replace(layer_entries={**LAYER_ENTRIES, **_STARCODER}),
    "internlm2": LLAMA._replace(
        global_entries={**GLOBAL_ENTRIES, "embedding.*": "model.tok_embeddings.*"},
        layer_entries=_INTERNLM2,
        head_name="output",
    ),
}  # fmt: skip
