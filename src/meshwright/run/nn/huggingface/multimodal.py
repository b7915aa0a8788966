"""Families that join a vision tower to a decoder: of their checkpoints, the decoder is read."""

from meshwright.run.nn.huggingface.dense import DENSE
from meshwright.run.nn.huggingface.family import Family


def _beside(family: Family) -> Family:
    """Return a family's names where the decoder is one part of a larger model."""
    before = "language_model."
    return family._replace(
        outside={ours: f"{before}{theirs}" for ours, theirs in family.outside.items()},
        layers=before + family.layers,
        head=before + family.head,
        spare=r"^(vision_tower|multi_modal_projector)\.",
    )


_QWEN2_VL = DENSE["qwen2"]._replace(spare=r"^visual\.")

MULTIMODAL: dict[str, Family] = {
    "gemma3": _beside(DENSE["gemma3_text"]),
    "llava": _beside(DENSE["llama"]),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
}
