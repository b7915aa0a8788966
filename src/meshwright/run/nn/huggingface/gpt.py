"""Families in GPT's shape, as tables of names: fused queries, keys and values, plain MLPs."""

from meshwright.run.nn.huggingface.dense import QKV, qkv_groups
from meshwright.run.nn.huggingface.family import Family, Table
from meshwright.run.nn.huggingface.links import Chosen, Entry, Grouped, Same, Site, Turned

_MASKS = r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$"

_NEOX: Table = {
    "norm_mixer.*": "input_layernorm.*",
    "mixer.qkv.*": Grouped("attention.query_key_value.*", qkv_groups),
    "mixer.o.*": "attention.dense.*",
    "norm_mlp.*": "post_attention_layernorm.*",
    "mlp.up.*": "mlp.dense_h_to_4h.*",
    "mlp.down.*": "mlp.dense_4h_to_h.*",
}

_BLOOM = Family(
    {
        "embedding.*": "transformer.word_embeddings.*",
        "norm_embedding.*": "transformer.word_embeddings_layernorm.*",
        "final_norm.*": "transformer.ln_f.*",
    },
    {
        **_NEOX,
        "mixer.qkv.*": Grouped("self_attention.query_key_value.*", qkv_groups),
        "mixer.o.*": "self_attention.dense.*",
    },
    layers="transformer.h.#.",
    root="transformer.",
)


def _apart(site: Site) -> bool:
    """Tell whether two parallel parts have a norm each (Falcon-40B)."""
    return site.block is not None and site.block.norms == "parallel"


def _falcon_norm(site: Site) -> Entry:
    return Same("ln_attn.*" if _apart(site) else "input_layernorm.*")


def _falcon_mlp_norm(site: Site) -> Entry:
    return Same("ln_mlp.*" if _apart(site) else "post_attention_layernorm.*")


GPT: dict[str, Family] = {
    "gpt2": Family(
        {
            "embedding.*": "transformer.wte.*",
            "positions.*": "transformer.wpe.*",
            "final_norm.*": "transformer.ln_f.*",
        },
        {
            "norm_mixer.*": "ln_1.*",
            "mixer.qkv.*": Turned(Same("attn.c_attn.*")),
            "mixer.o.*": Turned(Same("attn.c_proj.*")),
            "norm_mlp.*": "ln_2.*",
            "mlp.up.*": Turned(Same("mlp.c_fc.*")),
            "mlp.down.*": Turned(Same("mlp.c_proj.*")),
        },
        layers="transformer.h.#.",
        root="transformer.",
        spare=_MASKS,
    ),
    "opt": Family(
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
        layers="model.decoder.layers.#.",
        root="model.",
    ),
    "bloom": _BLOOM,
    "falcon": _BLOOM._replace(
        inside={
            **_BLOOM.inside,
            "norm_mixer.*": Chosen(_falcon_norm),
            "norm_mlp.*": Chosen(_falcon_mlp_norm),
        },
    ),
    "mpt": Family(
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
        layers="transformer.blocks.#.",
        root="transformer.",
    ),
    "gpt_neox": Family(
        {
            "embedding.*": "gpt_neox.embed_in.*",
            "final_norm.*": "gpt_neox.final_layer_norm.*",
        },
        _NEOX,
        layers="gpt_neox.layers.#.",
        head="embed_out",
        spare=_MASKS,
    ),
}
