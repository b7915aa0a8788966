"""Where two layouts, or two models, do not mean the same.

Meaning is compared, not spelling: a field that has no effect (the kind of context parallelism
with `cp=1`) may differ, and so may two ways to say one thing (`expert_tp` left out, or equal to
`tp`). Labels (a model's name and family, the names of its blocks) are not compared.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.block import BlockSpec
from meshwright.spec.model.model import Model
from meshwright.spec.model.rotary import Rotary

DEFAULT_ORDER = "tp-cp-ep-dp-pp"

_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
LLAMA3_ROPE: Mapping[str, Any] = {
    "low_frequency": 1.0,
    "high_frequency": 4.0,
    "original_positions": 8192,
}
"""What Llama 3.1's rotary rule has besides its factor. Megatron-Core fixes the same numbers
(`_apply_scaling` in megatron/core/models/common/embeddings/rotary_pos_embedding.py)."""

_LABELS = frozenset({"name", "family"})


class SpecDifference(NamedTuple):
    """One field that does not mean the same in two values."""

    path: str
    """The field, such as `recompute_ops` or `blocks.moe.mlp.scale`."""
    original: Any
    """Its value in the first."""
    converted: Any
    """Its value in the second."""


def normalize_layout(layout: Layout) -> Layout:
    """Return the layout with every field that has no effect at its default."""
    spread = layout.dp * layout.cp
    changes: dict[str, Any] = {
        "expert_tp": layout.effective_expert_tp,
        "offload": tuple(sorted(set(layout.offload))),
        "recompute_ops": tuple(sorted(set(layout.recompute_ops))),
    }
    if layout.offload_layers == 0:
        kept = set(layout.offload) - {"activations"}
        changes |= {"offload": tuple(sorted(kept)), "offload_layers": None}
    zero = layout.zero if layout.shard_degree > 1 else 0
    changes["zero"] = zero
    changes["shard"] = layout.shard_degree if zero else None
    if layout.stage_layers is not None and len(set(layout.stage_layers)) == 1:
        changes["stage_layers"] = None
    if layout.precision == "fp32" and layout.master_precision == "fp32":
        changes["master_precision"] = "none"  # fp32 weights are their own master copy
    if layout.cp == 1:
        changes["cp_kind"] = "ring"
    if layout.pp == 1:
        changes |= {"schedule": "1f1b", "overlap_pp": True, "stage_layers": None}
    if zero == 0:
        changes["overlap_parameters"] = True
    if spread == 1:
        changes["overlap_gradients"] = True
    if layout.tp == 1:
        changes["overlap_tp"] = False
    if layout.ep == 1:
        changes["overlap_ep"] = False
    changes["order"] = _effective_order(layout)
    return msgspec.structs.replace(layout, **changes)


def _effective_order(layout: Layout) -> str:
    """Return the default order where it gives the same ranks."""
    sizes = {
        "tp": max(layout.tp, layout.effective_expert_tp),
        "cp": layout.cp,
        "ep": layout.ep,
        "dp": max(layout.dp, layout.expert_dp),
        "pp": layout.pp,
    }
    kept = [axis for axis in layout.order.split("-") if sizes[axis] > 1]
    standard = [axis for axis in DEFAULT_ORDER.split("-") if sizes[axis] > 1]
    return DEFAULT_ORDER if kept == standard else layout.order


def diff_layouts(wanted: Layout, got: Layout) -> tuple[SpecDifference, ...]:
    """List the fields in which two layouts do not mean the same, with the values as given."""
    first, second = normalize_layout(wanted), normalize_layout(got)
    return tuple(
        SpecDifference(name, getattr(wanted, name), getattr(got, name))
        for name in Layout.__struct_fields__
        if getattr(first, name) != getattr(second, name)
    )


def diff_models(wanted: Model, got: Model) -> tuple[SpecDifference, ...]:
    """List the fields in which two models do not mean the same, layer by layer."""
    found: dict[str, SpecDifference] = {}
    for name in Model.__struct_fields__:
        if name in _LABELS or name in {"blocks", "pattern", "multi_token"}:
            continue
        one, two = getattr(wanted, name), getattr(got, name)
        if one != two:
            for difference in _leaves(_plain(one), _plain(two), name):
                found.setdefault(difference.path, difference)
    if wanted.layers != got.layers:
        found["pattern"] = SpecDifference("pattern", wanted.pattern, got.pattern)
    else:
        pairs = zip(wanted.layer_blocks(), got.layer_blocks(), strict=True)
        for first, second in dict.fromkeys(pairs):
            for difference in _block_differences(first, second, f"blocks.{first.name}"):
                found.setdefault(difference.path, difference)
    for difference in _multi_token_differences(wanted, got):
        found.setdefault(difference.path, difference)
    return tuple(found.values())


def _multi_token_differences(wanted: Model, got: Model) -> list[SpecDifference]:
    one, two = wanted.multi_token, got.multi_token
    if one is None or two is None:
        return [] if one is two else [SpecDifference("multi_token", _plain(one), _plain(two))]
    found = _block_differences(wanted.block(one.block), got.block(two.block), "multi_token.block")
    if one.depth != two.depth:
        found.append(SpecDifference("multi_token.depth", one.depth, two.depth))
    return found


def _block_differences(wanted: BlockSpec, got: BlockSpec, path: str) -> list[SpecDifference]:
    parts = ("mixer", "mlp", "norms")
    return [
        difference
        for part in parts
        for difference in _leaves(
            _plain(getattr(wanted, part)), _plain(getattr(got, part)), f"{path}.{part}"
        )
    ]


def _plain(value: Any) -> Any:
    """Return a value as plain data, with the settings that a rotary rule implies filled in."""
    if isinstance(value, Rotary):
        value = _with_implied(value)
    if isinstance(value, msgspec.Struct):
        plain = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        return plain if tag is None else {"kind": tag, **plain}
    return value


def _with_implied(rotary: Rotary) -> Rotary:
    implied: Mapping[str, Any] = {}
    if rotary.scaling == "yarn":
        implied = _YARN_DEFAULTS
    elif rotary.scaling == "llama3":
        implied = LLAMA3_ROPE
    missing = {name: value for name, value in implied.items() if getattr(rotary, name) is None}
    return msgspec.structs.replace(rotary, **missing)


def _leaves(wanted: Any, got: Any, path: str) -> list[SpecDifference]:
    if wanted == got:
        return []
    if isinstance(wanted, dict) and isinstance(got, dict):
        if wanted.get("kind") != got.get("kind"):
            return [SpecDifference(f"{path}.kind", wanted.get("kind"), got.get("kind"))]
        return [
            difference
            for key, value in wanted.items()
            for difference in _leaves(value, got.get(key), f"{path}.{key}")
        ]
    return [SpecDifference(path, _word(wanted), _word(got))]


def _word(value: Any) -> Any:
    """Return a whole part by its kind, so that an error line stays short."""
    return value.get("kind", value) if isinstance(value, dict) else value
