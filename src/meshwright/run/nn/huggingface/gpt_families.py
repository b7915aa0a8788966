"""Families in GPT's shape, as tables of names: fused queries, keys and values, plain MLPs."""

from meshwright.run.nn.huggingface.dense_families import QKV, get_qkv_group_rows
from meshwright.run.nn.huggingface.tensor_mapping import (
    GroupInterleaved,
    LayerKindEntry,
    MapEntry,
    ParameterSite,
    SameTensor,
    TransposedTensor,
)
from meshwright.run.nn.huggingface.weight_map import MapEntries, WeightMap

_MASKS = r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$"

_NEOX: MapEntries = {
    "norm_mixer.*": "input_layernorm.*",
    "mixer.qkv.*": GroupInterleaved("attention.query_key_value.*", get_qkv_group_rows),
    "mixer.o.*": "attention.dense.*",
    "norm_mlp.*": "post_attention_layernorm.*",
    "mlp.up.*": "mlp.dense_h_to_4h.*",
    "mlp.down.*": "mlp.dense_4h_to_h.*",
}

_BLOOM = WeightMap(
    {
        "embedding.*": "transformer.word_embeddings.*",
        "norm_embedding.*": "transformer.word_embeddings_layernorm.*",
        "final_norm.*": "transformer.ln_f.*",
    },
    {
        **_NEOX,
        "mixer.qkv.*": GroupInterleaved("self_attention.query_key_value.*", get_qkv_group_rows),
        "mixer.o.*": "self_attention.dense.*",
    },
    layer_prefix="transformer.h.#.",
    optional_prefix="transformer.",
)


def _apart(site: ParameterSite) -> bool:
    """Tell whether two parallel parts have a norm each (Falcon-40B)."""
    return site.block is not None and site.block.norms == "parallel"


def _falcon_norm(site: ParameterSite) -> MapEntry:
    return SameTensor("ln_attn.*" if _apart(site) else "input_layernorm.*")


def _falcon_mlp_norm(site: ParameterSite) -> MapEntry:
    return SameTensor("ln_mlp.*" if _apart(site) else "post_attention_layernorm.*")


GPT: dict[str, WeightMap] = {
    "gpt2": WeightMap(
        {
            "embedding.*": "transformer.wte.*",
            "positions.*": "transformer.wpe.*",
            "final_norm.*": "transformer.ln_f.*",
        },
        {
            "norm_mixer.*": "ln_1.*",
            "mixer.qkv.*": TransposedTensor(SameTensor("attn.c_attn.*")),
            "mixer.o.*": TransposedTensor(SameTensor("attn.c_proj.*")),
            "norm_mlp.*": "ln_2.*",
            "mlp.up.*": TransposedTensor(SameTensor("mlp.c_fc.*")),
            "mlp.down.*": TransposedTensor(SameTensor("mlp.c_proj.*")),
        },
        layer_prefix="transformer.h.#.",
        optional_prefix="transformer.",
        ignored_pattern=_MASKS,
    ),
    "opt": WeightMap(
        {
            "embedding.*": "model.decoder.embed_tokens.*",
            "positions.*": "model.decoder.embed_positions.*",
            "final_norm.*": "model.decoder.final_layer_norm.*",
        },
        {
            "norm_mixer.*": "self_attn_layer_norm.*",
            "mixer.qkv.*": QKV,
            "mixer.o.*": "self_attn.out_proj.*",
            "norm_mlp.*": "final_layer_norm.*",
            "mlp.up.*": "fc1.*",
            "mlp.down.*": "fc2.*",
        },
        layer_prefix="model.decoder.layers.#.",
        optional_prefix="model.",
    ),
    "bloom": _BLOOM,
    "falcon": _BLOOM._replace(
        layer_entries={
            **_BLOOM.layer_entries,
            "norm_mixer.*": LayerKindEntry(_falcon_norm),
            "norm_mlp.*": LayerKindEntry(_falcon_mlp_norm),
        },
    ),
    "mpt": WeightMap(
        {
            "embedding.*": "transformer.wte.*",
            "final_norm.*": "transformer.norm_f.*",
        },
        {
            "norm_mixer.*": "norm_1.*",
            "mixer.qkv.*": "attn.Wqkv.*",
            "mixer.o.*": "attn.out_proj.*",
            "norm_mlp.*": "norm_2.*",
            "mlp.up.*": "ffn.up_proj.*",
            "mlp.down.*": "ffn.down_proj.*",
        },
        layer_prefix="transformer.blocks.#.",
        optional_prefix="transformer.",
    ),
    "gpt_neox": WeightMap(
        {
            "embedding.*": "gpt_neox.embed_in.*",
            "final_norm.*": "gpt_neox.final_layer_norm.*",
        },
        _NEOX,
        layer_prefix="gpt_neox.layers.#.",
        head_name="embed_out",
        ignored_pattern=_MASKS,
    ),
}
