"""Rotary settings in a config: `rope_theta` with `rope_scaling`, or `rope_parameters` (v5).

Both forms are read, in the first form is written: every version of transformers reads that one.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.spec.model.huggingface.config_fields import MISSING, ConfigFields
from meshwright.spec.model.rotary import Rotary, RotaryScaling
from meshwright.spec.name_suggestions import format_suggestion

SCALINGS: dict[str, RotaryScaling] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "mrope": "mrope",
}

# Our field and the config's key, for the settings that are copied as they are.
_NUMBERS = {
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
}
_OTHERS = {
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "truncate",
    "original_max_position_embeddings", "short_factor", "long_factor", "short_mscale",
    "long_mscale", "mrope_section", "finetuned",
}  # fmt: skip
_KNOWN = _OTHERS | set(_NUMBERS.values())


def read_rope(
    fields: ConfigFields,
    theta: tuple[str, float],
    fraction: tuple[str, float] = ("partial_rotary_factor", 1.0),
    *,
    interleaved: bool = False,
    layer_kind: str = "",
    scaling: Mapping[str, Any] | None = None,
) -> Rotary:
    """Read the rotary settings of a config, those of one kind of layer where it has several.

    `theta` and `fraction` are keys with their defaults, `scaling` is what an absent
    `rope_scaling` means.
    """
    table = fields.table("rope_parameters")
    if table is not None and layer_kind and table.has(layer_kind):
        table = table.table(layer_kind)
    if table is None:
        table = fields.table("rope_scaling")
    if table is None:
        table = ConfigFields({} if fields.get("rope_scaling") is None else scaling or {})
    for key in table.names():
        if key not in _KNOWN:
            table.add_problem(
                key, "is not a known rotary setting", format_suggestion(key, sorted(_KNOWN))
            )
    base = table.number("rope_theta", fields.number(*theta))
    share = table.number("partial_rotary_factor", fields.number(*fraction))
    rule = table.choice("rope_type|type", SCALINGS, "default")
    sections = table.integers("mrope_section", least=1) or ()
    if sections and rule == "none":
        rule = "mrope"
    if rule == "mrope" and not sections:
        table.add_problem("mrope_section", "is missing", "such as [16, 24, 24]")
    if not 0 < share <= 1:
        fields.add_problem(fraction[0], f"{share!r} is not in (0, 1]", "1.0")
        share = 1.0
    return Rotary(
        theta=_above_zero(fields, theta[0], base),
        fraction=share,
        interleaved=interleaved,
        scaling=rule,
        sections=sections if rule != "none" else (),
        **(_stretch(fields, table, rule) if rule != "none" else {}),
    )


def _above_zero(table: ConfigFields, key: str, value: float) -> float:
    if value > 0:
        return value
    table.add_problem(key, f"{value!r} is not above 0", "such as 1.0")
    return 1.0


def _stretch(fields: ConfigFields, table: ConfigFields, scaling: RotaryScaling) -> dict[str, Any]:
    needs_factor = scaling in {"linear", "dynamic", "llama3", "yarn"}
    factor = table.number("factor", MISSING if needs_factor else 1.0)
    original = "original_max_position_embeddings"
    numbers = {ours: table.optional_number(key) for ours, key in _NUMBERS.items()}
    if table.has("short_mscale") or table.has("long_mscale"):
        short, long = table.optional_number("short_mscale"), table.optional_number("long_mscale")
        numbers["attention_factor"] = short
        if short != long:
            table.add_problem("long_mscale", f"{long!r} differs from short_mscale={short!r}",
                        "only equal ones are supported")  # fmt: skip
    return {
        "factor": _above_zero(table, "factor", factor),
        "original_positions": table.optional_integer(original, fields.optional_integer(original)),
        "truncate": table.flag("truncate", True),
        "short_factors": table.numbers("short_factor"),
        "long_factors": table.numbers("long_factor"),
        **numbers,
    }


def write_rope_scaling(rotary: Rotary) -> dict[str, Any] | None:
    """Write the stretching of the context as `rope_scaling`."""
    if rotary.scaling == "none":
        return None
    # Multimodal sections stand beside the default kind in every version that reads `rope_type`.
    word = "default" if rotary.scaling == "mrope" else rotary.scaling
    scaling: dict[str, Any] = {"rope_type": word}
    if rotary.factor != 1.0 or rotary.scaling not in {"longrope", "mrope"}:
        scaling["factor"] = rotary.factor
    if rotary.original_positions is not None:
        scaling["original_max_position_embeddings"] = rotary.original_positions
    for ours, key in _NUMBERS.items():
        if getattr(rotary, ours) is not None:
            scaling[key] = getattr(rotary, ours)
    if not rotary.truncate:
        scaling["truncate"] = False
    if rotary.scaling == "longrope":
        scaling["short_factor"] = list(rotary.short_factors)
        scaling["long_factor"] = list(rotary.long_factors)
    if rotary.sections:
        scaling["mrope_section"] = list(rotary.sections)
    return scaling
