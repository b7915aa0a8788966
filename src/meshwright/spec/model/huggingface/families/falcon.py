"""Falcon: one `model_type` for two shapes, told apart by `new_decoder_architecture`.

Falcon-7B shares one norm and one key head; Falcon-40B has two norms and groups of key heads.
"""

from typing import Any

from msgspec.structs import replace

from meshwright.spec.model.block import NormPosition, NormSpec
from meshwright.spec.model.huggingface.config_fields import ConfigFields
from meshwright.spec.model.huggingface.decoder import read_decoder, write_decoder
from meshwright.spec.model.huggingface.family_traits import ConfigFlag, DecoderTraits, SizeKeys
from meshwright.spec.model.model import Model
from meshwright.spec.model.token_mixers import AttentionSpec

MODEL_TYPE = "falcon"

_NEW = DecoderTraits(
    model_type=MODEL_TYPE,
    architecture="FalconForCausalLM",
    hidden=4544, heads=71, ffn=None, vocab=65024, eps=1e-5, tied=True,
    keys=SizeKeys(
        kv_heads="num_kv_heads", head_dim="", ffn="ffn_hidden_size", eps="layer_norm_epsilon",
        activation="activation",
    ),
    norm=NormSpec(kind="layer", bias=True),
    norm_position="parallel",
    qkv_bias=ConfigFlag("bias"), out_bias=ConfigFlag("bias"), mlp_bias=ConfigFlag("bias"),
    gated=False, activation="gelu",
    fixed={"alibi": False},
)  # fmt: skip


def _old(kv_heads: int | None, place: NormPosition) -> DecoderTraits:
    keys = replace(_NEW.keys, kv_heads="")
    return replace(_NEW, keys=keys, kv_heads=kv_heads, norm_position=place)


def read_falcon(fields: ConfigFields) -> Model:
    """Read a Falcon config."""
    norms = fields.optional_integer("num_ln_in_parallel_attn")
    several, parallel = fields.flag("multi_query", True), fields.flag("parallel_attn", True)
    if fields.flag("new_decoder_architecture", False):
        return read_decoder(
            fields, replace(_NEW, norm_position="parallel" if norms != 1 else "parallel-shared")
        )
    return read_decoder(
        fields, _old(1 if several else None, "parallel-shared" if parallel else "pre")
    )


def write_falcon(model: Model) -> dict[str, Any]:
    """Write a Falcon config; what it cannot say is found by reading it back."""
    block = model.layer_blocks()[0]
    mixer = block.mixer
    kv_heads = mixer.kv_heads if isinstance(mixer, AttentionSpec) else 1
    heads = mixer.heads if isinstance(mixer, AttentionSpec) else 1
    old = block.norms == "pre" or (block.norms == "parallel-shared" and kv_heads in {1, heads})
    traits = _old(kv_heads, block.norms) if old else _NEW
    return {
        **write_decoder(model, traits),
        "new_decoder_architecture": not old,
        "multi_query": kv_heads == 1 or not old,
        "parallel_attn": block.norms != "pre",
        "num_ln_in_parallel_attn": None if old else 2 if block.norms == "parallel" else 1,
    }
