"""Which linear layers of a model compute in fp8: those where it is safe and pays."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.run.nn.linear.fp8_linear import RECIPES, Fp8Recipe, Fp8TrainingLinearMethod
from meshwright.run.nn.linear.linear import Linear

SKIPPED_MODULES = ("embedding", "head", "router")
"""Parts of names whose products stay in bf16: few FLOPs, or logits that fp8 would disturb."""

MIN_GEMM_SIZE = 310.0
"""Least M·K/(M+K) of a weight for which fp8 pays.

Per token, three products take 6·M·K FLOPs and save half of their bf16 time, which is 6·M·K over the
fp8 rate; writing x and dy in fp8 moves 6 bytes for each of the M+K elements. On an H200 with
1,300 TFLOP/s (half of it in bf16) and 4.2 TB/s the two are equal at 1,300 / 4.2.
"""


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """Which linear layers compute in which precision."""

    precision: str
    converted_modules: tuple[str, ...]
    skipped_modules: Mapping[str, str]
    """For each layer that stays as it was, why."""

    def __str__(self) -> str:
        lines = [
            f"{self.precision}: {len(self.converted_modules)} GEMMs, "
            f"{len(self.skipped_modules)} in bf16"
        ]
        lines += [f"  {name}: {why}" for name, why in self.skipped_modules.items()]
        return "\n".join(lines)


def apply_precision(
    module: nn.Module,
    precision: str | Fp8Recipe,
    *,
    keep: Collection[str] = SKIPPED_MODULES,
    smallest: float = MIN_GEMM_SIZE,
) -> PrecisionReport:
    """Let the linear layers of a module compute in a precision, where that is safe and pays.

    `keep` names parts of dotted names that stay in bf16; a layer whose M·K/(M+K) is below
    `smallest` stays too. A precision that is not fp8 puts every layer back.
    """
    recipe = _recipe(precision)
    layers = {name: each for name, each in module.named_modules() if isinstance(each, Linear)}
    if recipe is None:
        for each in layers.values():
            each.linear_method = None
        return PrecisionReport(str(precision), (), dict.fromkeys(layers, "not asked for"))
    _check_devices(recipe, layers.values())
    reasons = {name: _why_not(name, each, recipe, keep, smallest) for name, each in layers.items()}
    for name, each in layers.items():
        each.linear_method = None if reasons[name] else Fp8TrainingLinearMethod(recipe)
    converted = tuple(name for name, why in reasons.items() if not why)
    return PrecisionReport(
        recipe.name, converted, {name: why for name, why in reasons.items() if why}
    )


def cache_fp8_weights(module: nn.Module, keep: bool) -> None:
    """Let fp8 layers keep their weights' copies from one microbatch to the next, or not.

    Kept, they take 2 bytes per parameter and each weight is read once for both copies; otherwise
    once more, in backward. That is no more than once per step where a step has one microbatch.
    """
    for each in module.modules():
        if isinstance(each, Linear) and isinstance(each.linear_method, Fp8TrainingLinearMethod):
            each.linear_method.set_weight_caching(keep)


def _recipe(precision: str | Fp8Recipe) -> Fp8Recipe | None:
    if isinstance(precision, Fp8Recipe) or precision in RECIPES:
        return precision if isinstance(precision, Fp8Recipe) else RECIPES[precision]
    if precision in {"bf16", "fp16", "fp32"}:
        return None
    known = ", ".join(("bf16", "fp16", "fp32", *RECIPES))
    what = f"no layer here computes in {precision!r}"
    raise InputError([Problem("precision", what, f"use one of {known}")])


def _why_not(
    name: str, layer: Linear, recipe: Fp8Recipe, keep: Collection[str], smallest: float
) -> str:
    """Say why a layer stays in bf16; empty where it need not."""
    part = next((part for part in name.split(".") if part in keep), None)
    if part is not None:
        return f"{part} is kept"
    fan_out, fan_in = layer.weight.shape
    if fan_out % recipe.alignment or fan_in % recipe.alignment:
        return f"{fan_out}×{fan_in} has a side that is no multiple of {recipe.alignment}"
    if fan_out * fan_in < smallest * (fan_out + fan_in):
        return f"{fan_out}×{fan_in} is too small to gain"
    return ""


def _check_devices(recipe: Fp8Recipe, layers: Collection[Linear]) -> None:
    """Refuse GPUs whose tensor cores lack what the recipe needs; a CPU computes what it means."""
    for device in {each.weight.device for each in layers if each.weight.is_cuda}:
        able = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        if recipe.scaling == "blockwise" and able[0] != 9:
            hint = "use fp8-rowwise or fp8-tensorwise"
            raise MissingDependency(f"{recipe.name} needs a Hopper GPU, this is a {name}", hint)
        if able < (8, 9):
            raise MissingDependency(f"a {name} has no fp8 GEMMs", "use bf16")
