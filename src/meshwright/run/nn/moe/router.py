"""`TopKRouter`: which experts a token visits, and how much each of them counts.

Scores are formed in float32 from a product that is never rounded below that. The order of things
is that of the published models, and their own implementations are what it is tested against:

    scores      softmax or sigmoid of the product
    choice      scores plus the balancing bias, where there is one; it only decides who is visited
    groups      the best groups by their best expert (DeepSeek-V2, softmax) or by the sum of their
                two best (DeepSeek-V3, sigmoid), before the best experts within them
    weights     the chosen scores without that bias, brought to a sum of one, times a scale

Letters: N tokens, D hidden, X experts, k experts per token.
"""

# Autograd's own functions are untyped. Shape suffixes name the fields of Routes.
# mypy: allow-untyped-calls
# ruff: noqa: N815

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwright.errors import InputError, Problem
from meshwright.spec.model import feedforward

_TINY = 1e-20
"""Keeps sigmoid scores that are all zero from being divided by zero (as DeepSeek-V3 does)."""


class TopKRoutes(NamedTuple):
    """Where tokens go."""

    experts_Nk: Tensor
    """int64: the experts each token visits."""
    weights_Nk: Tensor
    """float32: how much each of them counts."""
    scores_NX: Tensor
    """float32: what the router gave every expert."""


class TopKRouter(nn.Module):
    """The router of a `MoELayer`."""

    bias: nn.Parameter | None

    def __init__(
        self,
        spec: feedforward.MoESpec,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(spec)
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.count, hidden, device=device, dtype=dtype))
        bias = None
        if spec.router_bias == "linear":
            bias = nn.Parameter(torch.empty(spec.count, device=device, dtype=dtype))
        self.register_parameter("bias", bias)

    def forward(self, x_ND: Tensor, balance_X: Tensor | None = None) -> TopKRoutes:
        """Route tokens; `balance_X` shifts who is chosen, and nothing else."""
        spec = self.spec
        logits_NX = fp32_output_linear(x_ND, self.weight)
        if self.bias is not None:
            logits_NX = logits_NX + self.bias.to(logits_NX.dtype)
        if spec.scoring == "softmax":
            scores_NX = logits_NX.softmax(-1)
        else:
            scores_NX = logits_NX.sigmoid()
        choice_NX = scores_NX.detach()
        if balance_X is not None:
            choice_NX = choice_NX + balance_X.detach().to(choice_NX.dtype)
        if spec.groups > 1:
            choice_NX = self._within_best_groups(choice_NX)
        experts_Nk = choice_NX.topk(spec.top_k, dim=-1, sorted=False).indices
        weights_Nk = scores_NX.gather(1, experts_Nk)
        if spec.normalise:
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + _TINY)
        return TopKRoutes(experts_Nk, weights_Nk * spec.scale, scores_NX)

    def get_initial_values(self) -> dict[str, float]:
        """Return the value that parameters which are not drawn at random start from."""
        return {"bias": 0.0}

    def _within_best_groups(self, choice_NX: Tensor) -> Tensor:
        each = self.spec.count // self.spec.groups
        grouped = choice_NX.view(-1, self.spec.groups, each)
        best = 1 if self.spec.scoring == "softmax" else min(2, grouped.shape[-1])
        merit = grouped.topk(best, dim=-1, sorted=False).values.sum(-1)
        used = merit.topk(self.spec.groups_used, dim=-1, sorted=False).indices
        out = torch.ones_like(merit, dtype=torch.bool).scatter(-1, used, False)
        return grouped.masked_fill(out[..., None], -torch.inf).flatten(-2)


def fp32_output_linear(x_ND: Tensor, weight_XD: Tensor) -> Tensor:
    """Return the float32 product of 16-bit factors, without float32 copies of them on a GPU."""
    if x_ND.is_cuda and x_ND.dtype == weight_XD.dtype and x_ND.dtype.itemsize == 2:
        logits: Tensor = _PreciseLinear.apply(x_ND, weight_XD)
        return logits
    precise = torch.promote_types(x_ND.dtype, torch.float32)
    return functional.linear(x_ND.to(precise), weight_XD.to(precise))


class _PreciseLinear(torch.autograd.Function):
    """A product whose result alone is float32; autograd has no derivative for torch's own."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_XD: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_XD)
        return torch.mm(x_ND, weight_XD.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NX: Tensor) -> tuple[Tensor, Tensor]:
        x_ND, weight_XD = ctx.saved_tensors
        rounded = grad_NX.to(x_ND.dtype)
        return rounded @ weight_XD, rounded.t() @ x_ND


def _check(spec: feedforward.MoESpec) -> None:
    if spec.count % spec.groups:
        what = f"{spec.count} experts do not divide into {spec.groups} groups"
        raise InputError([Problem("experts.groups", what, "use a divisor of experts.count")])
    reach = spec.groups_used * (spec.count // spec.groups)
    if spec.top_k > reach:
        what = f"{spec.top_k} experts per token, but its groups have only {reach}"
        raise InputError([Problem("experts.top_k", what, f"use at most {reach}")])
