"""Rotary position settings in Megatron-Core's words."""

from typing import Any

from meshwright.errors import InputError
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.bridge.spec_diff import LLAMA3_ROPE
from meshwright.spec.model.rotary import Rotary
from meshwright.spec.serialization import format_value

SETTINGS = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_type",
    "apply_rope_fusion",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mrope_section",
)

# megatron/training/argument_utils.py, `_apply_yarn_config_from_args`, and `MLATransformerConfig`.
_YARN_POSITIONS = 4096


def get_position_type(rotary: Rotary, latent: bool) -> str:
    """Return the kind of position embedding; latent attention names its rule elsewhere."""
    if latent:
        return "rope"
    return {"yarn": "yarn", "mrope": "mrope"}.get(rotary.scaling, "rope")


def write_rope(rotary: Rotary | None, latent: bool) -> dict[str, Any]:
    """Return the rotary settings, each explicit."""
    rotary = rotary or Rotary()
    theta = rotary.theta
    yarn = rotary.scaling == "yarn"
    llama3 = rotary.scaling == "llama3"
    linear = rotary.scaling == "linear" and rotary.factor.is_integer()
    ordinary = yarn and not latent
    return {
        # The flag takes whole numbers only.
        "rotary_base": int(theta) if theta.is_integer() else theta,
        "rotary_percent": rotary.fraction,
        # Latent attention always pairs neighbours, and refuses the switch.
        "rotary_interleaved": rotary.interleaved and not latent,
        "rotary_seq_len_interpolation_factor": int(rotary.factor) if linear else None,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": rotary.factor if llama3 else None,
        # Latent attention assumes YaRN unless told otherwise, and fuses only that.
        "rope_type": ("yarn" if yarn else "rope") if latent else None,
        "apply_rope_fusion": None if yarn or not latent else False,
        "rotary_scaling_factor": rotary.factor if yarn else None,
        "mscale": rotary.mscale if yarn else None,
        "mscale_all_dim": rotary.mscale_all_dim if yarn else None,
        "yarn_original_max_position_embeddings": rotary.original_positions if ordinary else None,
        "yarn_beta_fast": rotary.beta_fast if ordinary else None,
        "yarn_beta_slow": rotary.beta_slow if ordinary else None,
        "yarn_correction_range_round_to_int": rotary.truncate if ordinary else None,
        "original_max_position_embeddings": (
            rotary.original_positions if yarn and latent else None
        ),
        "beta_fast": rotary.beta_fast if yarn and latent else None,
        "beta_slow": rotary.beta_slow if yarn and latent else None,
        "mrope_section": list(rotary.sections) or None,
    }


def read_rope(settings: FrameworkConfig, kind: str, latent: bool) -> Rotary | None:
    """Return the rotary settings, None (with the fault recorded) where they make no sense."""
    fields: dict[str, Any] = {
        "theta": settings.number("rotary_base", 10000.0),
        "fraction": settings.number("rotary_percent", 1.0),
        "interleaved": latent or settings.flag("rotary_interleaved"),
    }
    settings.flag("apply_rope_fusion")
    rule = settings.choice("rope_type", {"rope": "rope", "yarn": "yarn"}, "yarn")
    if latent and rule == "yarn":
        fields |= _yarn(settings, "")
    elif not latent and kind == "yarn":
        fields |= _yarn(settings, "yarn_")
    elif kind == "mrope":
        fields |= {"scaling": "mrope", "sections": _sections(settings)}
    elif settings.flag("use_rope_scaling"):
        factor = settings.number("rope_scaling_factor", 8.0)
        fields |= {"scaling": "llama3", "factor": factor, **LLAMA3_ROPE}
    elif settings.has("rotary_seq_len_interpolation_factor"):
        factor = settings.number("rotary_seq_len_interpolation_factor", 1.0)
        fields |= {"scaling": "linear", "factor": factor}
    try:
        return Rotary(**fields)
    except InputError as error:
        for problem in error.problems:
            settings.add_problem(
                _ORIGIN.get(problem.where, "rotary_base"), problem.what, problem.fix
            )
        return None


_ORIGIN = {
    "theta": "rotary_base",
    "fraction": "rotary_percent",
    "factor": "rotary_scaling_factor",
}


def _yarn(settings: FrameworkConfig, prefix: str) -> dict[str, Any]:
    positions = settings.integer(f"{prefix}original_max_position_embeddings", _YARN_POSITIONS)
    return {
        "scaling": "yarn",
        "factor": settings.number("rotary_scaling_factor", 1.0),
        "original_positions": positions,
        "beta_fast": settings.optional_number(f"{prefix}beta_fast"),
        "beta_slow": settings.optional_number(f"{prefix}beta_slow"),
        "mscale": settings.optional_number("mscale"),
        "mscale_all_dim": settings.optional_number("mscale_all_dim"),
        "truncate": settings.flag("yarn_correction_range_round_to_int", True),
    }


def _sections(settings: FrameworkConfig) -> tuple[int, ...]:
    value = settings.raw("mrope_section")
    items = value if isinstance(value, list | tuple) else str(value or "").split()
    try:
        return tuple(int(item) for item in items)
    except (TypeError, ValueError):
        settings.add_problem(
            "mrope_section",
            f"{format_value(value)} is not a list of whole numbers",
            "write 16 24 24",
        )
        return ()
