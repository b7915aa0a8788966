"""Families that mix attention with recurrences, as tables of names: Qwen3-Next and Nemotron-H."""

from collections.abc import Sequence

from meshwright.run.nn.huggingface.dense_families import (
    LAYER_ENTRIES,
    LLAMA,
    get_attention_spec,
    get_qkv_row_counts,
)
from meshwright.run.nn.huggingface.moe_families import QWEN_MOE, make_per_expert_entries
from meshwright.run.nn.huggingface.tensor_mapping import (
    GroupInterleaved,
    GroupInterleavedPart,
    LayerKindEntry,
    MapEntry,
    ParameterSite,
    SameTensor,
    StackedTensors,
    UnsqueezedTensor,
)
from meshwright.run.nn.huggingface.weight_map import MapEntries, WeightMap, make_stacked_tensors
from meshwright.spec.model import GatedDeltaNetSpec


def _gated_rows(site: ParameterSite) -> Sequence[int]:
    queries, keys, values = get_qkv_row_counts(site)
    return queries, keys, values, queries


def _gated_heads(site: ParameterSite) -> Sequence[int]:
    """A head's queries stand beside its gates."""
    mixer = get_attention_spec(site)
    return mixer.heads, mixer.head_dim, mixer.head_dim


def _delta(site: ParameterSite) -> GatedDeltaNetSpec:
    mixer = site.block.mixer if site.block is not None else None
    assert isinstance(mixer, GatedDeltaNetSpec)
    return mixer


def _key_groups(site: ParameterSite) -> Sequence[int]:
    """Each key head stands with its queries, then the values and gates of the heads it serves."""
    mixer = _delta(site)
    values = mixer.value_heads // mixer.key_heads * mixer.value_dim
    return mixer.key_heads, mixer.key_dim, mixer.key_dim, values, values


def _gate_groups(site: ParameterSite) -> Sequence[int]:
    mixer = _delta(site)
    shared = mixer.value_heads // mixer.key_heads
    return mixer.key_heads, shared, shared


def _output(site: ParameterSite) -> MapEntry:
    linear = site.block is not None and isinstance(site.block.mixer, GatedDeltaNetSpec)
    return SameTensor("linear_attn.out_proj.*" if linear else "self_attn.o_proj.*")


_QWEN3_NEXT: MapEntries = {
    "mixer.qkv.*": StackedTensors(
        (
            GroupInterleavedPart("self_attn.q_proj.*", _gated_heads, 0),
            SameTensor("self_attn.k_proj.*"),
            SameTensor("self_attn.v_proj.*"),
            GroupInterleavedPart("self_attn.q_proj.*", _gated_heads, 1),
        ),
        _gated_rows,
    ),
    "mixer.qkvz.*": GroupInterleaved("linear_attn.in_proj_qkvz.*", _key_groups),
    "mixer.gates.*": GroupInterleaved("linear_attn.in_proj_ba.*", _gate_groups),
    "mixer.conv.*": UnsqueezedTensor("linear_attn.conv1d.*"),
    "mixer.decay_log": "linear_attn.A_log",
    "mixer.step_bias": "linear_attn.dt_bias",
    "mixer.norm.*": "linear_attn.norm.*",
    "mixer.o.*": LayerKindEntry(_output),
}

_NEMOTRON_H: MapEntries = {
    "norm_mixer.*": "norm.*",
    "norm_mlp.*": "norm.*",
    "mixer.qkv.*": make_stacked_tensors(
        "mixer.q_proj.*", "mixer.k_proj.*", "mixer.v_proj.*", sizes=get_qkv_row_counts
    ),
    "mixer.o.*": "mixer.o_proj.*",
    "mixer.input.*": "mixer.in_proj.*",
    "mixer.conv.*": UnsqueezedTensor("mixer.conv1d.*"),
    "mixer.decay_log": "mixer.A_log",
    "mixer.step_bias": "mixer.dt_bias",
    "mixer.skip": "mixer.D",
    "mixer.norm.*": "mixer.norm.*",
    "mixer.out.*": "mixer.out_proj.*",
    "mlp.up.*": "mixer.up_proj.*",
    "mlp.down.*": "mixer.down_proj.*",
    "mlp.router.*": "mixer.gate.*",
    "mlp.balance": "mixer.gate.e_score_correction_bias",
    **make_per_expert_entries(
        "", "mixer.experts.%.up_proj.weight", "mixer.experts.%.down_proj.weight"
    ),
    "mlp.shared.up.*": "mixer.shared_experts.up_proj.*",
    "mlp.shared.down.*": "mixer.shared_experts.down_proj.*",
    "mlp.latent_down.*": "mixer.fc1_latent_proj.*",
    "mlp.latent_up.*": "mixer.fc2_latent_proj.*",
}

_MTP = r"^mtp\."
"""Multi-token heads, whose names have no source but the checkpoints."""

HYBRID: dict[str, WeightMap] = {
    "qwen3_next": LLAMA._replace(
        layer_entries={**LAYER_ENTRIES, **QWEN_MOE, **_QWEN3_NEXT}, ignored_pattern=_MTP
    ),
    "nemotron_h": WeightMap(
        {"embedding.*": "backbone.embeddings.*", "final_norm.*": "backbone.norm_f.*"},
        _NEMOTRON_H,
        layer_prefix="backbone.layers.#.",
        ignored_pattern=_MTP,
    ),
}
