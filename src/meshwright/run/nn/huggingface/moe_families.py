"""Families with experts, from Mixtral to DeepSeek-V3 and gpt-oss, as tables of names."""

from collections.abc import Sequence

from meshwright.run.nn.huggingface.dense_families import LAYER_ENTRIES, LLAMA
from meshwright.run.nn.huggingface.tensor_mapping import (
    GroupInterleaved,
    LayerKindEntry,
    MapEntry,
    ParameterSite,
    PerExpertTensors,
    RowStackedExperts,
    SameTensor,
    SwappedPairs,
    TransposedTensor,
)
from meshwright.run.nn.huggingface.weight_map import MapEntries, WeightMap, make_stacked_tensors
from meshwright.spec.model import LatentAttentionSpec, MoESpec


def make_per_expert_entries(gate: str, up: str, down: str) -> MapEntries:
    """Make the lines of experts that have tensors of their own; `%` is the expert."""
    return {
        "mlp.gate_up": PerExpertTensors(make_stacked_tensors(gate, up)),
        "mlp.up": PerExpertTensors(SameTensor(up)),
        "mlp.down": PerExpertTensors(SameTensor(down)),
    }


def _latent(site: ParameterSite) -> LatentAttentionSpec:
    mixer = site.block.mixer if site.block is not None else None
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


def _down_rows(site: ParameterSite) -> Sequence[int]:
    mixer = _latent(site)
    return mixer.q_rank or 0, mixer.kv_rank + mixer.rope_dim


def _query_rows(site: ParameterSite) -> Sequence[int]:
    mixer = _latent(site)
    return mixer.heads, mixer.nope_dim, mixer.rope_dim


def _down(site: ParameterSite) -> MapEntry:
    keys = "self_attn.kv_a_proj_with_mqa.*"
    if _latent(site).q_rank is None:
        return SameTensor(keys)
    return make_stacked_tensors("self_attn.q_a_proj.*", keys, sizes=_down_rows)


def _turns(site: ParameterSite) -> Sequence[int]:
    """Gate and up take turns, one row of each for every unit of an expert's width."""
    mlp = site.block.mlp if site.block is not None else None
    assert isinstance(mlp, MoESpec)
    return mlp.width, 1, 1


_MIXTRAL: MapEntries = {
    "mlp.router.*": "block_sparse_moe.gate.*",
    **make_per_expert_entries(
        "block_sparse_moe.experts.%.w1.weight",
        "block_sparse_moe.experts.%.w3.weight",
        "block_sparse_moe.experts.%.w2.weight",
    ),
}

_ROUTED: MapEntries = {
    "mlp.router.*": "mlp.gate.*",
    "mlp.balance": "mlp.gate.e_score_correction_bias",
    **make_per_expert_entries(
        "mlp.experts.%.gate_proj.weight",
        "mlp.experts.%.up_proj.weight",
        "mlp.experts.%.down_proj.weight",
    ),
}

QWEN_MOE: MapEntries = {
    **_ROUTED,
    "mlp.shared.gate_up.*": make_stacked_tensors(
        "mlp.shared_expert.gate_proj.*", "mlp.shared_expert.up_proj.*"
    ),
    "mlp.shared.down.*": "mlp.shared_expert.down_proj.*",
    "mlp.shared_gate.*": "mlp.shared_expert_gate.*",
}

_SHARED: MapEntries = {
    **_ROUTED,
    "mlp.shared.gate_up.*": make_stacked_tensors(
        "mlp.shared_experts.gate_proj.*", "mlp.shared_experts.up_proj.*"
    ),
    "mlp.shared.down.*": "mlp.shared_experts.down_proj.*",
}

_LATENT: MapEntries = {
    "mixer.q.*": SwappedPairs("self_attn.q_proj.*", _query_rows),
    "mixer.down.*": LayerKindEntry(_down),
    "mixer.q_norm.*": "self_attn.q_a_layernorm.*",
    "mixer.q_up.*": SwappedPairs("self_attn.q_b_proj.*", _query_rows),
    "mixer.kv_norm.*": "self_attn.kv_a_layernorm.*",
    "mixer.kv_up.*": "self_attn.kv_b_proj.*",
}

_AHEAD: MapEntries = {
    "norm_embedding.*": "enorm.*",
    "norm_hidden.*": "hnorm.*",
    "join.*": "eh_proj.*",
    "final_norm.*": "shared_head.norm.*",
}

_REPEATED = {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}

_GPT_OSS: MapEntries = {
    "mixer.sinks": "self_attn.sinks",
    "mlp.router.*": "mlp.router.*",
    "mlp.gate_up": TransposedTensor(GroupInterleaved("mlp.experts.gate_up_proj", _turns, axis=-1)),
    "mlp.gate_up_bias": GroupInterleaved("mlp.experts.gate_up_proj_bias", _turns, axis=-1),
    "mlp.down": TransposedTensor(SameTensor("mlp.experts.down_proj")),
    "mlp.down_bias": "mlp.experts.down_proj_bias",
}

_DEEPSEEK = LLAMA._replace(
    layer_entries={**LAYER_ENTRIES, **_SHARED, **_LATENT},
    mtp_entries=_AHEAD,
    mtp_duplicates=_REPEATED,
)

_DBRX = WeightMap(
    {"embedding.*": "transformer.wte.*", "final_norm.*": "transformer.norm_f.*"},
    {
        "norm_mixer.*": "norm_attn_norm.norm_1.*",
        "mixer.qkv.*": "norm_attn_norm.attn.Wqkv.*",
        "mixer.o.*": "norm_attn_norm.attn.out_proj.*",
        "norm_mlp.*": "norm_attn_norm.norm_2.*",
        "mlp.router.*": "ffn.router.layer.*",
        "mlp.gate_up": RowStackedExperts(
            make_stacked_tensors("ffn.experts.mlp.w1", "ffn.experts.mlp.v1")
        ),
        "mlp.down": RowStackedExperts(TransposedTensor(SameTensor("ffn.experts.mlp.w2"))),
    },
    layer_prefix="transformer.blocks.#.",
)

MOE: dict[str, WeightMap] = {
    "mixtral": LLAMA._replace(layer_entries={**LAYER_ENTRIES, **_MIXTRAL}),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "olmoe"),
        LLAMA._replace(layer_entries={**LAYER_ENTRIES, **QWEN_MOE}),
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
    "glm4_moe": LLAMA._replace(
        layer_entries={**LAYER_ENTRIES, **_SHARED}, mtp_entries=_AHEAD, mtp_duplicates=_REPEATED
    ),
    "dbrx": _DBRX,
    "gpt_oss": LLAMA._replace(layer_entries={**LAYER_ENTRIES, **_GPT_OSS}),
}
