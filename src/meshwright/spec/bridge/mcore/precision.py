"""Number formats, the optimizer with its states, and host offload in Megatron-Core's settings."""

from typing import Any

from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.bridge.mcore.parallelism import get_zero_stage
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

SETTINGS = (
    "bf16",
    "fp16",
    "fp8",
    "fp8_recipe",
    "fp4",
    "fp4_recipe",
    "grad_reduce_in_fp32",
    "optimizer",
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "cpu_offloading_num_layers",
    "fine_grained_activation_offloading",
    "offload_modules",
)

# Formats that Transformer Engine takes for each scaling rule: e5m2 gradients ("hybrid") only
# with one scale per tensor.
_FP8 = {
    "fp8-tensorwise": ("hybrid", "tensorwise"),
    "fp8-blockwise": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}
_RECIPES = {recipe: precision for precision, (_, recipe) in _FP8.items()}
_OPTIMIZERS = {"adamw": "adam", "muon": "muon", "lion": "lion", "sgd": "sgd"}
_OPTIMIZERS_BACK = {
    **{word: name for name, word in _OPTIMIZERS.items()},
    "dist_muon": "muon",
}
_MOMENTS = ("fp32", "fp16", "bf16", "fp8")


def write_precision(layout: Layout, model: Model | None) -> dict[str, Any]:
    """Return the settings of number formats and offload."""
    fp8, recipe = _FP8.get(layout.precision, (None, None))
    half = layout.precision == "fp16"
    aware = layout.optimizer == "adamw" and get_zero_stage(layout) > 0
    master = layout.master_precision if layout.precision != "fp32" else "fp32"
    moments = layout.moment_precision if aware and layout.moment_precision in _MOMENTS else "fp32"
    master = master if aware and master in {"fp32", "fp16"} else "fp32"
    offload = aware and "optimizer" in layout.offload
    return {
        "bf16": not half and layout.precision != "fp32",
        "fp16": half,
        "fp8": fp8,
        "fp8_recipe": recipe,
        "fp4": "e2m1" if layout.precision == "nvfp4" else None,
        "fp4_recipe": "nvfp4" if layout.precision == "nvfp4" else None,
        "grad_reduce_in_fp32": _gradients_in_fp32(layout),
        "optimizer": _OPTIMIZERS[layout.optimizer],
        "use_precision_aware_optimizer": offload or (moments, master) != ("fp32", "fp32"),
        "main_params_dtype": master,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        "optimizer_cpu_offload": offload,
        "cpu_offloading_num_layers": count_offloaded_layers(layout, model),
    }


def _gradients_in_fp32(layout: Layout) -> bool | None:
    """Return the switch, None where Megatron has no choice (fp32 training)."""
    return None if layout.precision == "fp32" else layout.gradient_precision == "fp32"


def count_offloaded_layers(layout: Layout, model: Model | None) -> int | None:
    """Return how many layers keep activations on the host: all but the last at Megatron's most."""
    if "activations" not in layout.offload or layout.pp > 1 or layout.recompute != "none":
        return None
    if model is None:
        return layout.offload_layers or None
    most = model.layers - 1
    return (most if layout.offload_layers is None else min(most, layout.offload_layers)) or None


def read_precision(settings: FrameworkConfig) -> dict[str, Any]:
    """Return precision, optimizer and offload fields."""
    precision = _precision(settings)
    half = {"fp16": "fp16", "fp32": "fp32"}.get(precision, "bf16")
    gradients = _gradients(settings, half)
    moments = _dtype(settings, "exp_avg_dtype")
    if _dtype(settings, "exp_avg_sq_dtype") != moments:
        settings.add_note("exp_avg_sq_dtype", f"differs from the first moment; {moments} is read")
    return {
        "precision": precision,
        "gradient_precision": gradients,
        "master_precision": "none" if half == "fp32" else _dtype(settings, "main_params_dtype"),
        "moment_precision": moments,
        "optimizer": _optimizer(settings),
        **_offload(settings),
    }


def _precision(settings: FrameworkConfig) -> str:
    fp16, bf16 = settings.flag("fp16"), settings.flag("bf16")
    if fp16 and bf16:
        settings.add_problem(
            "fp16", f"cannot be combined with {settings.label('bf16')}", "give one"
        )
    if settings.has("fp4"):
        recipe = settings.text("fp4_recipe")
        if recipe not in {None, "nvfp4"}:
            settings.add_note("fp4_recipe", f"{recipe!r} cannot be held; nvfp4 is read")
        return "nvfp4"
    if settings.has("fp8"):
        recipe = settings.text("fp8_recipe") or "delayed"
        if recipe == "delayed":
            settings.add_note(
                "fp8_recipe", "delayed scaling is read as one scale per tensor (fp8-tensorwise)"
            )
            return "fp8-tensorwise"
        if recipe == "custom":
            settings.add_note(
                "fp8_recipe", "a custom recipe cannot be held; fp8-tensorwise is read"
            )
            return "fp8-tensorwise"
        return settings.choice("fp8_recipe", _RECIPES, "fp8-tensorwise")
    return "fp16" if fp16 else "bf16" if bf16 else "fp32"


def _gradients(settings: FrameworkConfig, half: str) -> str:
    if half == "fp32":
        return "fp32"
    if _dtype(settings, "main_grads_dtype") != "fp32":
        return _dtype(settings, "main_grads_dtype")
    # megatron/training/arguments.py: bf16 accumulates in fp32 unless told not to, fp16 does not.
    in_fp32 = settings.flag("grad_reduce_in_fp32", half == "bf16")
    return "fp32" if in_fp32 else half


def _dtype(settings: FrameworkConfig, key: str) -> str:
    words = {
        "fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8",
        "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16",
        "torch.uint8": "fp8", "torch.float": "fp32", "torch.half": "fp16",
        "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
    }  # fmt: skip
    return settings.choice(key, words, "fp32")


def _optimizer(settings: FrameworkConfig) -> str:
    word = settings.text("optimizer")
    if word in {"soap", "adaptive_muon"}:
        settings.add_note("optimizer", f"{word!r} cannot be held by a layout; adamw is read")
        return "adamw"
    return settings.choice("optimizer", _OPTIMIZERS_BACK, "adamw")


def _offload(settings: FrameworkConfig) -> dict[str, Any]:
    found = []
    layers = settings.integer("cpu_offloading_num_layers", 0, least=0) or None
    if layers or settings.flag("fine_grained_activation_offloading"):
        found.append("activations")
    if settings.flag("optimizer_cpu_offload"):
        found.append("optimizer")
        fraction = settings.number("optimizer_offload_fraction", 1.0)
        if fraction != 1.0:
            settings.add_note("optimizer_offload_fraction", f"{fraction} is read as all of it")
    return {"offload": tuple(found), "offload_layers": layers}
