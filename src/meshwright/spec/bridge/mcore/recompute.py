"""Recompute, overlap and the schedule in Megatron-Core's settings."""

from typing import Any

from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.bridge.mcore.parallelism import get_zero_stage
from meshwright.spec.layout.choices import RECOMPUTE_OPS
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

SETTINGS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "moe_layer_recompute",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tp_comm_overlap",
    "overlap_p2p_comm",
    "overlap_moe_expert_parallel_comm",
)

# megatron/core/transformer/transformer_config.py, `recompute_modules`: no module of its own for
# the activation function of a dense MLP.
_MODULES = RECOMPUTE_OPS - {"mlp_act"}


def write_recompute(layout: Layout, model: Model | None) -> dict[str, Any]:
    """Return the settings of what a step does beside computing once."""
    interleaved = layout.virtual_stages > 1
    zero = get_zero_stage(layout)
    return {
        **_recompute(layout),
        "overlap_grad_reduce": layout.overlap_gradients,
        "overlap_param_gather": layout.overlap_parameters and zero > 0 and layout.overlap_gradients,
        "tp_comm_overlap": layout.overlap_tp and layout.sequence_parallel,
        "overlap_p2p_comm": _overlap_p2p(layout, interleaved),
        "overlap_moe_expert_parallel_comm": layout.overlap_ep and _can_overlap_ep(layout, model),
    }


def _recompute(layout: Layout) -> dict[str, Any]:
    none = {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
    }
    if layout.recompute == "full":
        # "uniform" over units of one layer covers every layer; "block" counts per chunk.
        layers = layout.recompute_layers
        return {
            **none,
            "recompute_granularity": "full",
            "recompute_method": "uniform" if layers is None else "block",
            "recompute_num_layers": 1 if layers is None else layers,
        }
    modules = [op for op in layout.recompute_ops if op in _MODULES]
    if layout.recompute == "selective" and modules:
        return {**none, "recompute_granularity": "selective", "recompute_modules": modules}
    return none


def _overlap_p2p(layout: Layout, interleaved: bool) -> bool | None:
    """Return the switch, None where Megatron decides by itself."""
    if layout.pp == 1:
        return layout.overlap_pp
    if not interleaved:
        return None
    # Two stages without overlap would post two sends between one pair: Megatron refuses.
    return layout.overlap_pp or layout.pp == 2


def _can_overlap_ep(layout: Layout, model: Model | None) -> bool:
    """Tell whether Megatron-Core accepts the switch for this layout."""
    heads = model.multi_token.depth if model is not None and model.multi_token else 0
    return (
        layout.ep > 1
        and (layout.pp == 1 or layout.virtual_stages > 1)
        and layout.recompute != "full"
        and "moe" not in layout.recompute_ops
        and layout.precision != "fp32"
        and heads < 2
    )


def read_recompute(
    settings: FrameworkConfig, pp: int, virtual_stages: int, zero: int
) -> dict[str, Any]:
    """Return recompute, overlap and schedule fields."""
    interleaved = virtual_stages > 1
    fields = _read_recompute(settings)
    fields |= {
        "overlap_gradients": settings.flag("overlap_grad_reduce"),
        "overlap_tp": settings.flag("tp_comm_overlap"),
        "overlap_ep": settings.flag("overlap_moe_expert_parallel_comm"),
        "schedule": "interleaved" if interleaved else "1f1b",
    }
    gather = settings.flag("overlap_param_gather")
    p2p = settings.flag("overlap_p2p_comm", True)
    # Without sharding nothing is gathered; without interleaving Megatron never overlaps sends.
    fields["overlap_parameters"] = gather if zero else True
    fields["overlap_pp"] = p2p and (interleaved or pp == 1)
    return fields


def _read_recompute(settings: FrameworkConfig) -> dict[str, Any]:
    granularity = settings.choice(
        "recompute_granularity", {"full": "full", "selective": "selective"}, "none"
    )
    modules = settings.list_words("recompute_modules")
    if settings.flag("recompute_activations"):
        granularity = "selective"
    if settings.flag("moe_layer_recompute"):
        granularity, modules = "selective", (*(modules or ("core_attn",)), "moe")
    method = settings.choice("recompute_method", {"uniform": "uniform", "block": "block"}, "")
    layers = settings.optional_integer("recompute_num_layers", least=0)
    if granularity == "none":
        return {"recompute": "none"}
    if granularity == "selective":
        ops = modules or ("core_attn",)
        for op in ops:
            if op not in _MODULES:
                settings.add_note("recompute_modules", f"{op!r} cannot be held by a layout")
        kept = tuple(dict.fromkeys(op for op in ops if op in _MODULES))
        return {"recompute": "selective", "recompute_ops": kept}
    if method != "block":
        if layers is not None and layers > 1:
            settings.add_note(
                "recompute_num_layers",
                f"units of {layers} layers are read as every layer by itself",
            )
        return {"recompute": "full"}
    return {"recompute": "full", "recompute_layers": layers}
