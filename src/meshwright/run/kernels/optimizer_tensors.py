"""What an optimizer update works on: weights with their state, a rule, and the pace of one step."""

import math
from typing import Literal, NamedTuple

import torch

from meshwright.run.kernels.block_codes import BLOCK_ELEMENTS
from meshwright.run.kernels.places import Places

MomentPrecision = Literal["fp32", "bf16", "int8"]
RuleName = Literal["adamw", "lion", "sgd", "direction", "average", "apply"]


class Rule(NamedTuple):
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
    def moments(self) -> int:
        """Moments it keeps for each parameter."""
        return {"adamw": 2, "apply": 0}.get(self.name, 1)

    @property
    def writes_weights(self) -> bool:
        """Whether it changes the weight, rather than only the moment or the gradient."""
        return self.name not in {"direction", "average"}


class Moment(NamedTuple):
    """One moment of every parameter."""

    values: tuple[torch.Tensor, ...]
    """Shaped like the parameters: float32, bfloat16, or codes (int8; uint8 if never negative)."""
    scales: tuple[torch.Tensor, ...] = ()
    """float32, one for each block of a parameter's codes; empty where there are none."""

    @property
    def precision(self) -> MomentPrecision:
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
    moments: tuple[Moment, ...]
    """As many as the rule keeps."""
    keys: tuple[int, ...]
    """`tensor_key` of each: what its random bits depend on, beside the step and the place."""
    shares: tuple[float, ...]
    """What the learning rate is multiplied by, for each."""
    decays: tuple[float, ...]
    """Weight decay of each."""
    places: tuple[Places, ...]
    """Where the elements of each stand in the whole tensor of which it is a shard."""


def new_moment(params: tuple[torch.Tensor, ...], precision: MomentPrecision, index: int) -> Moment:
    """Return the first (`index` 0) or second (1) moment of parameters before the first step."""
    if precision == "int8":
        kind = torch.uint8 if index else torch.int8
        return Moment(
            tuple(torch.zeros_like(each, dtype=kind) for each in params),
            tuple(
                torch.zeros(-(-each.numel() // BLOCK_ELEMENTS), device=each.device)
                for each in params
            ),
        )
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    return Moment(tuple(torch.zeros_like(each, dtype=kind) for each in params))


class Pace(NamedTuple):
    """The numbers of one step, on the device."""

    step: torch.Tensor
    """int64 scalar: which update this is, counted from 1; skipped steps do not count."""
    numbers: torch.Tensor
    """float32 [5]: 1 or 0 for whether the step happens, what gradients are multiplied by, learning
    rate, 1 / (1 - β₁ᵗ), 1 / √(1 - β₂ᵗ)."""


def pace(
    step: torch.Tensor,
    lr: float | torch.Tensor,
    rule: Rule,
    *,
    grad_scale: torch.Tensor | None = None,
    go: torch.Tensor | None = None,
) -> Pace:
    """Put together the numbers of a step; nothing is waited for.

    `go` is a scalar that is false where the step shall leave everything as it is.
    """
    double = step.double()
    ones = torch.ones_like(double)
    correction1, correction2 = ones, ones
    if rule.name == "adamw":
        # In double: 1 - 0.999ᵗ of float32 numbers would lose four digits in the first steps.
        correction1 = 1 / _one_minus_power(rule.beta1, double)
        correction2 = _one_minus_power(rule.beta2, double).rsqrt()
    numbers = [
        ones if go is None else go.to(double),
        ones if grad_scale is None else grad_scale.to(double),
        lr.to(double) if isinstance(lr, torch.Tensor) else torch.full_like(double, lr),
        correction1,
        correction2,
    ]
    return Pace(step, torch.stack(numbers).float())


def _one_minus_power(beta: float, step: torch.Tensor) -> torch.Tensor:
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)
