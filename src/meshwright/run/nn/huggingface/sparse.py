"""Families with experts, from Mixtral to DeepSeek-V3 and gpt-oss, as tables of names."""

from collections.abc import Sequence

from meshwright.run.nn.huggingface.dense import INSIDE, LLAMA
from meshwright.run.nn.huggingface.family import Family, Table, joined
from meshwright.run.nn.huggingface.links import (
    Chosen,
    Entry,
    ExpertsInRows,
    Grouped,
    PerExpert,
    Same,
    Site,
    Swapped,
    Turned,
)
from meshwright.spec.model import Experts, LatentAttention


def per_expert(gate: str, up: str, down: str) -> Table:
    """Make the lines of experts that have tensors of their own; `%` is the expert."""
    return {
        "mlp.gate_up": PerExpert(joined(gate, up)),
        "mlp.up": PerExpert(Same(up)),
        "mlp.down": PerExpert(Same(down)),
    }


def _latent(site: Site) -> LatentAttention:
    mixer = site.block.mixer if site.block is not None else None
    assert isinstance(mixer, LatentAttention)
    return mixer


def _down_rows(site: Site) -> Sequence[int]:
    mixer = _latent(site)
    return mixer.q_rank or 0, mixer.kv_rank + mixer.rope_dim


def _query_rows(site: Site) -> Sequence[int]:
    mixer = _latent(site)
    return mixer.heads, mixer.nope_dim, mixer.rope_dim


def _down(site: Site) -> Entry:
    keys = "self_attn.kv_a_proj_with_mqa.*"
    if _latent(site).q_rank is None:
        return Same(keys)
    return joined("self_attn.q_a_proj.*", keys, sizes=_down_rows)


def _turns(site: Site) -> Sequence[int]:
    """Gate and up take turns, one row of each for every unit of an expert's width."""
    mlp = site.block.mlp if site.block is not None else None
    assert isinstance(mlp, Experts)
    return mlp.width, 1, 1


_MIXTRAL: Table = {
    "mlp.router.*": "block_sparse_moe.gate.*",
    **per_expert(
        "block_sparse_moe.experts.%.w1.weight",
        "block_sparse_moe.experts.%.w3.weight",
        "block_sparse_moe.experts.%.w2.weight",
    ),
}

_ROUTED: Table = {
    "mlp.router.*": "mlp.gate.*",
    "mlp.balance": "mlp.gate.e_score_correction_bias",
    **per_expert(
        "mlp.experts.%.gate_proj.weight",
        "mlp.experts.%.up_proj.weight",
        "mlp.experts.%.down_proj.weight",
    ),
}

QWEN_MOE: Table = {
    **_ROUTED,
    "mlp.shared.gate_up.*": joined("mlp.shared_expert.gate_proj.*", "mlp.shared_expert.up_proj.*"),
    "mlp.shared.down.*": "mlp.shared_expert.down_proj.*",
    "mlp.shared_gate.*": "mlp.shared_expert_gate.*",
}

_SHARED: Table = {
    **_ROUTED,
    "mlp.shared.gate_up.*": joined(
        "mlp.shared_experts.gate_proj.*", "mlp.shared_experts.up_proj.*"
    ),
    "mlp.shared.down.*": "mlp.shared_experts.down_proj.*",
}

_LATENT: Table = {
    "mixer.q.*": Swapped("self_attn.q_proj.*", _query_rows),
    "mixer.down.*": Chosen(_down),
    "mixer.q_norm.*": "self_attn.q_a_layernorm.*",
    "mixer.q_up.*": Swapped("self_attn.q_b_proj.*", _query_rows),
    "mixer.kv_norm.*": "self_attn.kv_a_layernorm.*",
    "mixer.kv_up.*": "self_attn.kv_b_proj.*",
}

_AHEAD: Table = {
    "norm_embedding.*": "enorm.*",
    "norm_hidden.*": "hnorm.*",
    "join.*": "eh_proj.*",
    "final_norm.*": "shared_head.norm.*",
}

_REPEATED = {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}

_GPT_OSS: Table = {
    "mixer.sinks": "self_attn.sinks",
    "mlp.router.*": "mlp.router.*",
    "mlp.gate_up": Turned(Grouped("mlp.experts.gate_up_proj", _turns, axis=-1)),
    "mlp.gate_up_bias": Grouped("mlp.experts.gate_up_proj_bias", _turns, axis=-1),
    "mlp.down": Turned(Same("mlp.experts.down_proj")),
    "mlp.down_bias": "mlp.experts.down_proj_bias",
}

_DEEPSEEK = LLAMA._replace(
    inside={**INSIDE, **_SHARED, **_LATENT}, ahead=_AHEAD, repeated=_REPEATED
)

_DBRX = Family(
    {"embedding.*": "transformer.wte.*", "final_norm.*": "transformer.norm_f.*"},
    {
        "norm_mixer.*": "norm_attn_norm.norm_1.*",
        "mixer.qkv.*": "norm_attn_norm.attn.Wqkv.*",
        "mixer.o.*": "norm_attn_norm.attn.out_proj.*",
        "norm_mlp.*": "norm_attn_norm.norm_2.*",
        "mlp.router.*": "ffn.router.layer.*",
        "mlp.gate_up": ExpertsInRows(joined("ffn.experts.mlp.w1", "ffn.experts.mlp.v1")),
        "mlp.down": ExpertsInRows(Turned(Same("ffn.experts.mlp.w2"))),
    },
    layers="transformer.blocks.#.",
)

SPARSE: dict[str, Family] = {
    "mixtral": LLAMA._replace(inside={**INSIDE, **_MIXTRAL}),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "olmoe"), LLAMA._replace(inside={**INSIDE, **QWEN_MOE})
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
    "glm4_moe": LLAMA._replace(inside={**INSIDE, **_SHARED}, ahead=_AHEAD, repeated=_REPEATED),
    "dbrx": _DBRX,
    "gpt_oss": LLAMA._replace(inside={**INSIDE, **_GPT_OSS}),
}
