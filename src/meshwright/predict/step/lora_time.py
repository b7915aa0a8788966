"""Compute time that LoRA adapters add to the passes of dense and expert layers."""

from typing import NamedTuple

from meshwright.predict.cost import bytes_moved, grouped_gemm_s, linear_s, memory_s
from meshwright.predict.training_run.lora_shapes import LORA_FORWARD_KERNELS, list_adapter_pairs
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.model import MoESpec, Weight


class LoRAPassTimes(NamedTuple):
    """Seconds that adapters add to the three parts of a block, and kernels of a forward pass."""

    forward_s: float = 0.0
    dgrad_s: float = 0.0
    wgrad_s: float = 0.0
    kernels: int = 0


def lora_passes(run: TrainingRun, weights: tuple[Weight, ...]) -> LoRAPassTimes:
    """Return the time of the adapters beside some dense weights."""
    total = LoRAPassTimes()
    if run.adapter is None:
        return total
    for out, into, weight in list_adapter_pairs(run, weights):
        if weight.part == "expert":
            continue
        tokens = run.local_tokens if weight.split == "none" else run.microbatch_tokens
        parts = (
            linear_s(run.device_costs, tokens, run.adapter.rank, into, "bf16", part=part)
            + linear_s(run.device_costs, tokens, out, run.adapter.rank, "bf16", part=part)
            for part in ("forward", "input_gradient", "weight_gradient")
        )
        total = _plus(run, total, tuple(parts), float(tokens * out), float(tokens * into))
    return total


def expert_lora_passes(run: TrainingRun, experts: MoESpec, routed: float) -> LoRAPassTimes:
    """Return the time of the adapters in routed experts that get `routed` tokens on this rank."""
    total = LoRAPassTimes()
    if run.adapter is None or "experts" not in run.adapter.targets:
        return total
    local = max(1, experts.count // run.layout.ep)
    each = routed / local
    for out, into, weight in list_adapter_pairs(run, experts.list_weights(run.model.hidden)):
        if weight.part != "expert":
            continue
        parts = (
            grouped_gemm_s(run.device_costs, local, each, run.adapter.rank, into, part=part)
            + grouped_gemm_s(run.device_costs, local, each, out, run.adapter.rank, part=part)
            for part in ("forward", "input_gradient", "weight_gradient")
        )
        total = _plus(run, total, tuple(parts), routed * out, routed * into)
    return total


def _plus(
    run: TrainingRun, total: LoRAPassTimes, parts: tuple[float, ...], out: float, into: float
) -> LoRAPassTimes:
    """Add one pair: its products, and adding its output and its input gradient to the others."""
    forward, inputs, gradient = parts
    return LoRAPassTimes(
        total.forward_s + forward + _added_s(run, out),
        total.dgrad_s + inputs + _added_s(run, into),
        total.wgrad_s + gradient,
        total.kernels + LORA_FORWARD_KERNELS,
    )


def _added_s(run: TrainingRun, elements: float) -> float:
    # One kernel however little the software fuses, as the sums of gradients are.
    return memory_s(run.device_costs, "optimizer", bytes_moved("residual", elements))
