"""Families that join a vision tower to a decoder: Gemma 3, Llama 4, Llava, Qwen2-VL, Qwen2.5-VL.

Each says which decoder it holds, how its tower and projector are read, and how they are written.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.spec.model.block import NormSpec
from meshwright.spec.model.huggingface.config_fields import ConfigFields, activation_key
from meshwright.spec.model.huggingface.decoder import read_decoder, write_decoder
from meshwright.spec.model.huggingface.families.dense import GEMMA3_TEXT, LLAMA, QWEN2
from meshwright.spec.model.huggingface.families.moe import LLAMA4_TEXT
from meshwright.spec.model.huggingface.family_traits import DecoderTraits
from meshwright.spec.model.huggingface.vision_fields import (
    CLIP,
    LLAMA4_VISION,
    SIGLIP,
    read_qwen2_5_tower,
    read_qwen2_tower,
    read_vit,
    write_qwen2_5_tower,
    write_qwen2_tower,
    write_vit,
)
from meshwright.spec.model.layer_pattern import MAX_LAYERS
from meshwright.spec.model.model import Model
from meshwright.spec.model.vision import VisionProjector, VisionTower


class MultimodalFamily(NamedTuple):
    """One family: a decoder, and how its tower is read from a config and written into one."""

    model_type: str
    architecture: str
    text: DecoderTraits
    read_tower: Callable[[ConfigFields, ConfigFields, int], VisionTower]
    """Takes the config, its `vision_config` and the decoder's width."""
    write_tower: Callable[[VisionTower, dict[str, Any], int], dict[str, Any]]
    """Returns the `vision_config`; may set other keys of the config it is given."""
    flat: bool = False
    """The decoder's keys may stand at the top, as they did before `text_config`."""


def read_multimodal(fields: ConfigFields, family: MultimodalFamily) -> Model:
    """Read a config of a decoder with a vision tower."""
    text = fields.table("text_config")
    if text is None:
        text = fields if family.flat else ConfigFields({}, "text_config.", fields.problems)
    elif fields.has("tie_word_embeddings") and not text.has("tie_word_embeddings"):
        # The switch stands beside the decoder's table in some versions, inside in others.
        tied = fields.flag("tie_word_embeddings", False)
        text = text.with_key("tie_word_embeddings", tied)
    if not family.flat:
        text.require_value("model_type", family.text.model_type)
    vision = fields.table("vision_config")
    tower = None
    if vision is None:
        if not fields.has("vision_config"):
            fields.add_problem("vision_config", "is missing", "add the tower's table")
    else:
        hidden = text.integer(family.text.keys.hidden, family.text.hidden)
        tower = family.read_tower(fields, vision, hidden)
    model = read_decoder(text, family.text)
    return replace(model, family=family.model_type, vision=tower)


def write_multimodal(model: Model, family: MultimodalFamily) -> dict[str, Any]:
    """Write a config of a decoder with a vision tower."""
    if model.vision is None:
        what = f"a {family.model_type} config needs a vision tower"
        raise InputError([Problem("vision", what, "add one, or write it as another family")])
    text = write_decoder(model, family.text)
    text.pop("architectures")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "tie_word_embeddings": model.tied,
    }
    vision = family.write_tower(model.vision, config, model.hidden)
    if family.flat:
        text.pop("model_type")
        return {**config, **text, "vision_config": vision}
    return {**config, "text_config": text, "vision_config": vision}


def _read_gemma3(fields: ConfigFields, vision: ConfigFields, hidden: int) -> VisionTower:
    del hidden
    tokens = fields.integer("mm_tokens_per_image", 256)
    tower = read_vit(vision, SIGLIP, VisionProjector())
    side, wanted = (tower.image or 0) // tower.patch, math.isqrt(tokens)
    if wanted**2 != tokens or side % wanted:
        fields.add_problem(
            "mm_tokens_per_image",
            f"{tokens} does not come from {side}×{side} patches",
            f"use {side * side}",
        )
        wanted = side
    norm = NormSpec(eps=tower.norm.eps, unit_offset=True)
    projector = VisionProjector(pool=side // wanted, bias=False, norm=norm)
    return replace(tower, projector=projector)


def _write_gemma3(tower: VisionTower, config: dict[str, Any], hidden: int) -> dict[str, Any]:
    del hidden
    config["mm_tokens_per_image"] = tower.num_patches // tower.projector.pool**2
    return write_vit(tower, SIGLIP)


def _read_llama4(fields: ConfigFields, vision: ConfigFields, hidden: int) -> VisionTower:
    del fields, hidden
    ratio = vision.number("pixel_shuffle_ratio", 0.5)
    merge = round(1 / ratio) if 0 < ratio <= 1 else 1
    if merge * ratio != 1:
        vision.add_problem(
            "pixel_shuffle_ratio", f"{ratio!r} is not one over a whole number", "0.5"
        )
    inner = vision.integer("projector_input_dim", 4096)
    for key in ("projector_output_dim", "vision_output_dim"):
        # The class's defaults for these three disagree with each other and run nowhere.
        if vision.integer(key, inner) != inner:
            vision.add_problem(key, f"{vision.get(key)!r} differs from projector_input_dim={inner}",
                         "use the same for both")  # fmt: skip
    projector = VisionProjector(
        merge=merge,
        inner_widths=(inner, inner),
        bias=vision.flag("multi_modal_projector_bias", False),
    )
    tower = read_vit(vision, LLAMA4_VISION, projector)
    width = vision.integer("intermediate_size", LLAMA4_VISION.ffn)
    if width != tower.hidden * merge**2:
        vision.add_problem("intermediate_size", f"{width} is not {merge}² times hidden_size",
                     str(tower.hidden * merge**2))  # fmt: skip
    return tower


def _write_llama4(tower: VisionTower, config: dict[str, Any], hidden: int) -> dict[str, Any]:
    del config, hidden
    inner = tower.projector.inner_widths[0] if tower.projector.inner_widths else 1
    return {
        **write_vit(tower, LLAMA4_VISION),
        "pixel_shuffle_ratio": 1 / tower.projector.merge,
        "projector_input_dim": inner,
        "projector_output_dim": inner,
        "vision_output_dim": inner,
        "multi_modal_projector_bias": tower.projector.bias,
    }


def _read_llava(fields: ConfigFields, vision: ConfigFields, hidden: int) -> VisionTower:
    fields.require_value("vision_feature_select_strategy", "default")
    layer = fields.integer("vision_feature_layer", -2, least=-MAX_LAYERS, most=-1)
    projector = VisionProjector(
        inner_widths=(hidden,),
        activation=fields.activation("projector_hidden_act", "gelu"),
        bias=fields.flag("multimodal_projector_bias", True),
        feature_layer=layer,
    )
    vision.require_value("model_type", CLIP.model_type)
    return read_vit(vision, CLIP, projector)


def _write_llava(tower: VisionTower, config: dict[str, Any], hidden: int) -> dict[str, Any]:
    del hidden
    config["projector_hidden_act"] = activation_key(tower.projector.activation, "gelu")
    config["multimodal_projector_bias"] = tower.projector.bias
    config["vision_feature_layer"] = tower.projector.feature_layer
    config["vision_feature_select_strategy"] = "default"
    return write_vit(tower, CLIP)


def _qwen_projector(vision: ConfigFields, width: int, norm: NormSpec) -> VisionProjector:
    merge = vision.integer("spatial_merge_size", 2)
    return VisionProjector(merge=merge, inner_widths=(width * merge**2,), norm=norm)


def _read_qwen2_vl(fields: ConfigFields, vision: ConfigFields, hidden: int) -> VisionTower:
    del fields
    vision.require_value("hidden_size", hidden)
    norm = NormSpec(kind="layer", bias=True, eps=1e-6)
    return read_qwen2_tower(
        vision, _qwen_projector(vision, vision.integer("embed_dim", 1280), norm)
    )


def _write_qwen2_vl(tower: VisionTower, config: dict[str, Any], hidden: int) -> dict[str, Any]:
    del config
    return {
        **write_qwen2_tower(tower),
        "hidden_size": hidden,
        "spatial_merge_size": tower.projector.merge,
    }


def _read_qwen2_5_vl(fields: ConfigFields, vision: ConfigFields, hidden: int) -> VisionTower:
    del fields
    vision.require_value("out_hidden_size", hidden)
    width = vision.integer("hidden_size", 3584)
    return read_qwen2_5_tower(vision, _qwen_projector(vision, width, NormSpec(eps=1e-6)))


def _write_qwen2_5_vl(tower: VisionTower, config: dict[str, Any], hidden: int) -> dict[str, Any]:
    del config
    return {
        **write_qwen2_5_tower(tower),
        "out_hidden_size": hidden,
        "spatial_merge_size": tower.projector.merge,
    }


_QWEN_TEXT = replace(
    QWEN2,
    model_type="qwen2_vl_text",
    hidden=8192, layers=80, heads=64, kv_heads=8, ffn=29568, vocab=152064, eps=1e-5,
    theta=1_000_000.0,
)  # fmt: skip

MULTIMODAL = (
    MultimodalFamily(
        "gemma3", "Gemma3ForConditionalGeneration", GEMMA3_TEXT, _read_gemma3, _write_gemma3
    ),
    MultimodalFamily(
        "llama4", "Llama4ForConditionalGeneration", LLAMA4_TEXT, _read_llama4, _write_llama4
    ),
    MultimodalFamily("llava", "LlavaForConditionalGeneration", LLAMA, _read_llava, _write_llava),
    MultimodalFamily(
        "qwen2_vl", "Qwen2VLForConditionalGeneration", _QWEN_TEXT, _read_qwen2_vl,
        _write_qwen2_vl, flat=True,
    ),
    MultimodalFamily(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _QWEN_TEXT, _read_qwen2_5_vl,
        _write_qwen2_5_vl, flat=True,
    ),
)  # fmt: skip
