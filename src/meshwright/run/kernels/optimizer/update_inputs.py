"""What an optimizer update works on: weights with their state, a rule, and the pace of one step."""

import math
from typing import Literal, NamedTuple

import torch

from meshwright.run.kernels.optimizer.block_quantization import BLOCK_ELEMENTS
from meshwright.run.kernels.optimizer.global_index import GlobalIndexMap

MomentDtype = Literal["fp32", "bf16", "int8"]
RuleName = Literal["adamw", "lion", "sgd", "direction", "average", "apply"]


class UpdateRule(NamedTuple):
    """How a gradient g, the moments m and v, and a weight w become the next ones.

    With lerp(a, b, t) = a + (b - a)·t, the learning rate lr and the decay d of a tensor, all but
    `direction` and `average` set w = w·(1 - lr·d) - lr·update, where

    adamw       m = lerp(m, g, 1-β₁), v = β₂·v + (1-β₂)·g², update = m̂ / (√v̂ + ε)   (1711.05101)
    lion        update = sign(lerp(m, g, 1-β₁)), then m = lerp(m, g, 1-β₂)           (2302.06675)
    sgd         m = β₁·m + g, update = m, or g + β₁·m where `nesterov`
    apply       update = g
    direction   m = lerp(m, g, 1-β₁), and g becomes m, or lerp(g, m, β₁) where `nesterov`: Muon's
                first half; the weight stays
    average     m = lerp(m, g, 1-β₁), and nothing else: an average of what is given as gradient
    """

    name: RuleName
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    nesterov: bool = False

    @property
    def num_moments(self) -> int:
        """Moments it keeps for each parameter."""
        return {"adamw": 2, "apply": 0}.get(self.name, 1)

    @property
    def writes_weights(self) -> bool:
        """Whether it changes the weight, rather than only the moment or the gradient."""
        return self.name not in {"direction", "average"}


class OptimizerMoment(NamedTuple):
    """One moment of every parameter."""

    values: tuple[torch.Tensor, ...]
    """Shaped like the parameters: float32, bfloat16, or codes (int8; uint8 if never negative)."""
    scales: tuple[torch.Tensor, ...] = ()
    """float32, one for each block of a parameter's codes; empty where there are none."""

    @property
    def dtype_name(self) -> MomentDtype:
        """Its format."""
        if self.scales:
            return "int8"
        return "bf16" if self.values and self.values[0].dtype == torch.bfloat16 else "fp32"


class OptimizerTensors(NamedTuple):
    """Parameters of one type and device with their state, position by position."""

    params: tuple[torch.Tensor, ...]
    """Contiguous weights."""
    masters: tuple[torch.Tensor, ...]
    """Their float32 masters; empty where weights are updated directly."""
    moments: tuple[OptimizerMoment, ...]
    """As many as the rule keeps."""
    rounding_keys: tuple[int, ...]
    """`make_tensor_key` of each: what its random bits depend on, beside the step and the place."""
    lr_multipliers: tuple[float, ...]
    """What the learning rate is multiplied by, for each."""
    weight_decays: tuple[float, ...]
    """Weight decay of each."""
    global_index_maps: tuple[GlobalIndexMap, ...]
    """Where the elements of each stand in the whole tensor of which it is a shard."""


def allocate_moment(
    params: tuple[torch.Tensor, ...], precision: MomentDtype, index: int
) -> OptimizerMoment:
    """Return the first (`index` 0) or second (1) moment of parameters before the first step."""
    if precision == "int8":
        kind = torch.uint8 if index else torch.int8
        return OptimizerMoment(
            tuple(torch.zeros_like(each, dtype=kind) for each in params),
            tuple(
                torch.zeros(-(-each.numel() // BLOCK_ELEMENTS), device=each.device)
                for each in params
            ),
        )
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    return OptimizerMoment(tuple(torch.zeros_like(each, dtype=kind) for each in params))


class StepScalars(NamedTuple):
    """The numbers of one step, on the device."""

    step: torch.Tensor
    """int64 scalar: which update this is, counted from 1; skipped steps do not count."""
    scalars: torch.Tensor
    """float32 [5]: 1 or 0 for whether the step happens, what gradients are multiplied by, learning
    rate, 1 / (1 - β₁ᵗ), 1 / √(1 - β₂ᵗ)."""


def make_step_scalars(
    step: torch.Tensor,
    lr: float | torch.Tensor,
    rule: UpdateRule,
    *,
    grad_scale: torch.Tensor | None = None,
    apply_update: torch.Tensor | None = None,
) -> StepScalars:
    """Put together the numbers of a step; nothing is waited for.

    `apply_update` is a scalar that is false where the step shall leave everything as it is.
    """
    double = step.double()
    ones = torch.ones_like(double)
    correction1, correction2 = ones, ones
    if rule.name == "adamw":
        # In double: 1 - 0.999ᵗ of float32 numbers would lose four digits in the first steps.
        correction1 = 1 / _one_minus_power(rule.beta1, double)
        correction2 = _one_minus_power(rule.beta2, double).rsqrt()
    numbers = [
        ones if apply_update is None else apply_update.to(double),
        ones if grad_scale is None else grad_scale.to(double),
        lr.to(double) if isinstance(lr, torch.Tensor) else torch.full_like(double, lr),
        correction1,
        correction2,
    ]
    return StepScalars(step, torch.stack(numbers).float())


def _one_minus_power(beta: float, step: torch.Tensor) -> torch.Tensor:
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)
