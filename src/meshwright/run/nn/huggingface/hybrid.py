"""Families that mix attention with recurrences, as tables of names: Qwen3-Next and Nemotron-H."""

from collections.abc import Sequence

from meshwright.run.nn.huggingface.dense import INSIDE, LLAMA, attention, qkv_rows
from meshwright.run.nn.huggingface.family import Family, Table, joined
from meshwright.run.nn.huggingface.links import (
    Chosen,
    Dealt,
    Entry,
    Grouped,
    Joined,
    Reshaped,
    Same,
    Site,
)
from meshwright.run.nn.huggingface.sparse import QWEN_MOE, per_expert
from meshwright.spec.model import GatedDelta


def _gated_rows(site: Site) -> Sequence[int]:
    queries, keys, values = qkv_rows(site)
    return queries, keys, values, queries


def _gated_heads(site: Site) -> Sequence[int]:
    """A head's queries stand beside its gates."""
    mixer = attention(site)
    return mixer.heads, mixer.head_dim, mixer.head_dim


def _delta(site: Site) -> GatedDelta:
    mixer = site.block.mixer if site.block is not None else None
    assert isinstance(mixer, GatedDelta)
    return mixer


def _key_groups(site: Site) -> Sequence[int]:
    """Each key head stands with its queries, then the values and gates of the heads it serves."""
    mixer = _delta(site)
    values = mixer.value_heads // mixer.key_heads * mixer.value_dim
    return mixer.key_heads, mixer.key_dim, mixer.key_dim, values, values


def _gate_groups(site: Site) -> Sequence[int]:
    mixer = _delta(site)
    shared = mixer.value_heads // mixer.key_heads
    return mixer.key_heads, shared, shared


def _output(site: Site) -> Entry:
    linear = site.block is not None and isinstance(site.block.mixer, GatedDelta)
    return Same("linear_attn.out_proj.*" if linear else "self_attn.o_proj.*")


_QWEN3_NEXT: Table = {
    "mixer.qkv.*": Joined(
        (
            Dealt("self_attn.q_proj.*", _gated_heads, 0),
            Same("self_attn.k_proj.*"),
            Same("self_attn.v_proj.*"),
            Dealt("self_attn.q_proj.*", _gated_heads, 1),
        ),
        _gated_rows,
    ),
    "mixer.qkvz.*": Grouped("linear_attn.in_proj_qkvz.*", _key_groups),
    "mixer.gates.*": Grouped("linear_attn.in_proj_ba.*", _gate_groups),
    "mixer.conv.*": Reshaped("linear_attn.conv1d.*"),
    "mixer.decay_log": "linear_attn.A_log",
    "mixer.step_bias": "linear_attn.dt_bias",
    "mixer.norm.*": "linear_attn.norm.*",
    "mixer.o.*": Chosen(_output),
}

_NEMOTRON_H: Table = {
    "norm_mixer.*": "norm.*",
    "norm_mlp.*": "norm.*",
    "mixer.qkv.*": joined("mixer.q_proj.*", "mixer.k_proj.*", "mixer.v_proj.*", sizes=qkv_rows),
    "mixer.o.*": "mixer.o_proj.*",
    "mixer.input.*": "mixer.in_proj.*",
    "mixer.conv.*": Reshaped("mixer.conv1d.*"),
    "mixer.decay_log": "mixer.A_log",
    "mixer.step_bias": "mixer.dt_bias",
    "mixer.skip": "mixer.D",
    "mixer.norm.*": "mixer.norm.*",
    "mixer.out.*": "mixer.out_proj.*",
    "mlp.up.*": "mixer.up_proj.*",
    "mlp.down.*": "mixer.down_proj.*",
    "mlp.router.*": "mixer.gate.*",
    "mlp.balance": "mixer.gate.e_score_correction_bias",
    **per_expert("", "mixer.experts.%.up_proj.weight", "mixer.experts.%.down_proj.weight"),
    "mlp.shared.up.*": "mixer.shared_experts.up_proj.*",
    "mlp.shared.down.*": "mixer.shared_experts.down_proj.*",
    "mlp.latent_down.*": "mixer.fc1_latent_proj.*",
    "mlp.latent_up.*": "mixer.fc2_latent_proj.*",
}

_MTP = r"^mtp\."
"""Multi-token heads, whose names have no source but the checkpoints."""

HYBRID: dict[str, Family] = {
    "qwen3_next": LLAMA._replace(inside={**INSIDE, **QWEN_MOE, **_QWEN3_NEXT}, spare=_MTP),
    "nemotron_h": Family(
        {"embedding.*": "backbone.embeddings.*", "final_norm.*": "backbone.norm_f.*"},
        _NEMOTRON_H,
        layers="backbone.layers.#.",
        spare=_MTP,
    ),
}
