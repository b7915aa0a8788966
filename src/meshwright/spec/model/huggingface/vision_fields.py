"""Vision towers in a config's `vision_config`: CLIP, SigLIP, Llama 4's, and Qwen-VL's two.

A tower is read without its projector, which belongs to the family that joins it to a decoder.
"""

import math
from typing import Any

import msgspec

from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.feedforward import Activation, MLPSpec
from meshwright.spec.model.huggingface.config_fields import ConfigFields, activation_key
from meshwright.spec.model.huggingface.rope_fields import read_rope
from meshwright.spec.model.rotary import Rotary
from meshwright.spec.model.token_mixers import AttentionSpec
from meshwright.spec.model.vision import VisionProjector, VisionTower

_LAYER_NORM = NormSpec(kind="layer", bias=True)


class VitTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What sets one plain vision transformer apart; figures are its config class's defaults."""

    model_type: str
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    ffn: int = 3072
    image: int = 224
    patch: int = 16
    activation: str = "quick_gelu"
    eps: tuple[str, float] = ("layer_norm_eps", 1e-5)
    patch_bias: bool = False
    class_token: bool = True
    pre_norm: bool = True
    theta: float | None = None
    """Default of `rope_theta`; None for towers without rotary positions."""
    fixed: dict[str, Any] = {}


CLIP = VitTraits(model_type="clip_vision_model", patch=32)
SIGLIP = VitTraits(
    model_type="siglip_vision_model",
    activation="gelu_pytorch_tanh",
    eps=("layer_norm_eps", 1e-6),
    patch_bias=True,
    class_token=False,
    pre_norm=False,
    fixed={"vision_use_head": False},
)
LLAMA4_VISION = VitTraits(
    model_type="llama4_vision_model",
    layers=34, heads=16, ffn=5632, image=448, patch=14,
    activation="gelu",
    eps=("norm_eps", 1e-5),
    theta=10_000.0,
    fixed={"vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
)  # fmt: skip


def _block(
    *, heads: int, head_dim: int, width: int, activation: Activation, gated: bool,
    rotary: Rotary | None,
) -> BlockSpec:  # fmt: skip
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        qkv_bias=True,
        out_bias=True,
        rotary=rotary,
        causal=False,
    )
    mlp = MLPSpec(width=width, gated=gated, activation=activation, bias=True)
    return BlockSpec(name="vision", mixer=attention, mlp=mlp)


def _head_dim(fields: ConfigFields, key: str, hidden: int, heads: int) -> int:
    if hidden % heads:
        fields.add_problem(key, f"{heads} does not divide the width {hidden}",
                     f"use {math.gcd(hidden, heads)}")  # fmt: skip
    return max(1, hidden // heads)


def read_vit(fields: ConfigFields, v: VitTraits, projector: VisionProjector) -> VisionTower:
    """Read a plain vision transformer; a faulty size leaves a stand-in, as its fault is noted."""
    hidden = fields.integer("hidden_size", v.hidden)
    heads = fields.integer("num_attention_heads", v.heads)
    image, patch = fields.integer("image_size", v.image), fields.integer("patch_size", v.patch)
    eps = fields.number(*v.eps)
    if image % patch:
        fields.add_problem("image_size", f"{image} is not a multiple of patch_size={patch}",
                     f"use {max(image // patch, 1) * patch}")  # fmt: skip
        image = patch
    if eps < 0:
        fields.add_problem(v.eps[0], f"{eps!r} is negative", "1e-5")
    for key, value in v.fixed.items():
        fields.require_value(key, value)
    rotary = read_rope(fields, ("rope_theta", v.theta)) if v.theta is not None else None
    return VisionTower(
        hidden=hidden,
        layers=fields.integer("num_hidden_layers", v.layers),
        block=_block(
            heads=heads,
            head_dim=_head_dim(fields, "num_attention_heads", hidden, heads),
            width=fields.integer("intermediate_size", v.ffn),
            activation=fields.activation("hidden_act", v.activation),
            gated=False,
            rotary=rotary,
        ),
        patch=patch,
        image=image,
        channels=fields.integer("num_channels", 3),
        patch_bias=v.patch_bias,
        positions=(image // patch) ** 2 + v.class_token,
        class_token=v.class_token,
        pre_norm=v.pre_norm,
        post_norm=True,
        norm=msgspec.structs.replace(_LAYER_NORM, eps=max(eps, 0.0)),
        projector=projector,
    )


def write_vit(tower: VisionTower, v: VitTraits) -> dict[str, Any]:
    """Write a plain vision transformer."""
    mixer, mlp = tower.block.mixer, tower.block.mlp
    config: dict[str, Any] = {
        "model_type": v.model_type,
        "hidden_size": tower.hidden,
        "num_hidden_layers": tower.layers,
        "image_size": tower.image,
        "patch_size": tower.patch,
        "num_channels": tower.channels,
        v.eps[0]: tower.norm.eps,
        **v.fixed,
    }
    if isinstance(mixer, AttentionSpec):
        config["num_attention_heads"] = mixer.heads
        if v.theta is not None and mixer.rotary is not None:
            config["rope_theta"] = mixer.rotary.theta
    if isinstance(mlp, MLPSpec):
        config["intermediate_size"] = mlp.width
        config["hidden_act"] = activation_key(mlp.activation, v.activation)
    return config


def read_qwen2_tower(fields: ConfigFields, projector: VisionProjector) -> VisionTower:
    """Read the tower of Qwen2-VL: layer norms, plain MLP, images of any size."""
    hidden = fields.integer("embed_dim", 1280)
    heads = fields.integer("num_heads", 16)
    ratio = fields.number("mlp_ratio", 4)
    if ratio <= 0 or not (hidden * ratio).is_integer():
        fields.add_problem(
            "mlp_ratio", f"{ratio!r} times embed_dim={hidden} is not a whole width", "4"
        )
        ratio = 1.0
    return _qwen_tower(
        fields, projector, hidden, heads, width=int(hidden * ratio),
        activation=fields.activation("hidden_act", "quick_gelu"), gated=False,
        norm=msgspec.structs.replace(_LAYER_NORM, eps=1e-6),
    )  # fmt: skip


def read_qwen2_5_tower(fields: ConfigFields, projector: VisionProjector) -> VisionTower:
    """Read the tower of Qwen2.5-VL: RMS norms, gated MLP, most layers within windows."""
    hidden = fields.integer("hidden_size", 3584)
    heads = fields.integer("num_heads", 16)
    tower = _qwen_tower(
        fields, projector, hidden, heads, width=fields.integer("intermediate_size", 3420),
        activation=fields.activation("hidden_act", "silu"), gated=True,
        norm=NormSpec(eps=1e-6),
    )  # fmt: skip
    full = fields.integers("fullatt_block_indexes")
    return msgspec.structs.replace(
        tower,
        window=fields.integer("window_size", 112),
        full_layers=full if full is not None else (7, 15, 23, 31),
    )


def _qwen_tower(
    fields: ConfigFields, projector: VisionProjector, hidden: int, heads: int, *, width: int,
    activation: Activation, gated: bool, norm: NormSpec,
) -> VisionTower:  # fmt: skip
    return VisionTower(
        hidden=hidden,
        layers=fields.integer("depth", 32),
        block=_block(
            heads=heads,
            head_dim=_head_dim(fields, "num_heads", hidden, heads),
            width=width,
            activation=activation,
            gated=gated,
            rotary=Rotary(),
        ),
        patch=fields.integer("patch_size|spatial_patch_size", 14),
        temporal_patch=fields.integer("temporal_patch_size", 2),
        channels=fields.integer("in_channels|in_chans", 3),
        norm=norm,
        projector=projector,
    )


def write_qwen2_tower(tower: VisionTower) -> dict[str, Any]:
    """Write the tower of Qwen2-VL."""
    config = _write_qwen_tower(tower)
    config["embed_dim"] = tower.hidden
    if isinstance(tower.block.mlp, MLPSpec):
        ratio = tower.block.mlp.width / tower.hidden
        config["mlp_ratio"] = int(ratio) if ratio.is_integer() else ratio
        config["hidden_act"] = activation_key(tower.block.mlp.activation, "quick_gelu")
    return config


def write_qwen2_5_tower(tower: VisionTower) -> dict[str, Any]:
    """Write the tower of Qwen2.5-VL."""
    config = _write_qwen_tower(tower)
    config["hidden_size"] = tower.hidden
    config["window_size"] = tower.window
    config["fullatt_block_indexes"] = list(tower.full_layers)
    if isinstance(tower.block.mlp, MLPSpec):
        config["intermediate_size"] = tower.block.mlp.width
        config["hidden_act"] = activation_key(tower.block.mlp.activation, "silu")
    return config


def _write_qwen_tower(tower: VisionTower) -> dict[str, Any]:
    config: dict[str, Any] = {
        "depth": tower.layers,
        "patch_size": tower.patch,
        "temporal_patch_size": tower.temporal_patch,
        "in_channels": tower.channels,
    }
    if isinstance(tower.block.mixer, AttentionSpec):
        config["num_heads"] = tower.block.mixer.heads
    return config
