"""All families whose checkpoints can be read, and but for the multimodal ones written."""

from meshwright.errors import InputError
from meshwright.run.nn.huggingface.dense_families import DENSE
from meshwright.run.nn.huggingface.gpt_families import GPT
from meshwright.run.nn.huggingface.hybrid_families import HYBRID
from meshwright.run.nn.huggingface.moe_families import MOE
from meshwright.run.nn.huggingface.weight_map import WeightMap
from meshwright.spec.model import Model
from meshwright.spec.name_suggestions import build_unknown_name_problem


def _beside(family: WeightMap) -> WeightMap:
    """Return a family's names where the decoder is one part of a larger model."""
    before = "language_model."
    return family._replace(
        global_entries={
            ours: f"{before}{theirs}" for ours, theirs in family.global_entries.items()
        },
        layer_prefix=before + family.layer_prefix,
        head_name=before + family.head_name,
        ignored_pattern=r"^(vision_tower|multi_modal_projector)\.",
    )


_QWEN2_VL = DENSE["qwen2"]._replace(ignored_pattern=r"^visual\.")

MULTIMODAL: dict[str, WeightMap] = {
    "gemma3": _beside(DENSE["gemma3_text"]),
    "llava": _beside(DENSE["llama"]),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
}

WEIGHT_MAPS: dict[str, WeightMap] = {**DENSE, **GPT, **MOE, **HYBRID, **MULTIMODAL}


def list_model_types() -> tuple[str, ...]:
    """Return every `model_type` whose checkpoints can be read, sorted."""
    return tuple(sorted(WEIGHT_MAPS))


def get_weight_map(model: Model) -> WeightMap:
    """Return the table of a model's family."""
    if model.family in WEIGHT_MAPS:
        return WEIGHT_MAPS[model.family]
    problem = build_unknown_name_problem(
        "family of checkpoints", model.family, WEIGHT_MAPS, "family"
    )
    known = "known are " + ", ".join(list_model_types())
    raise InputError([problem._replace(fix=f"{problem.fix}; {known}")])
