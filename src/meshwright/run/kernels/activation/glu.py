"""Gated linear units: an activation of one half of a product's output times the other half.

    glu([gate, up]) = activation(gate) · up

`swiglu-clamped` is gpt-oss's: with gate at most `limit` and up within ±limit it gives
gate · σ(1.702 · gate) · (up + 1) (github.com/openai/gpt-oss, `swiglu` in gpt_oss/torch/model.py;
there the halves are interleaved). quick-gelu is x · σ(1.702 · x).

All arithmetic is float32, rounded once. Backward computes the activation again from what it kept,
the argument alone, and writes both halves' gradients in one pass.

Bytes moved, the floor, per element of the result: forward 3 accesses (gate, up, result), backward
5 (gate, up, gradient, and the gradients of both), and one more where the result is wanted again.

Letters: F the width of the result; the argument has 2F columns, gate first.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

import math
from typing import Any, get_args

import torch
from torch.nn import functional

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.autograd import apply_autograd
from meshwright.run.kernels.triton_compat import (
    KernelBackend,
    make_pdl_launch_options,
    should_use_triton,
    tl,
    triton,
    wait_for_inputs,
)
from meshwright.spec.model.feedforward import Activation

QUICK_GELU_SCALE = 1.702
"""Makes x · σ(1.702 · x) resemble GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
DEFAULT_CLAMP_LIMIT = 7.0
"""Where gpt-oss clamps, unless told otherwise."""
TILE = 2048
"""Columns of one program: two accesses of 16 bytes per thread and operand, in bfloat16."""
WARPS = 4

_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))
_TWICE_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))
_QUICK = tl.constexpr(QUICK_GELU_SCALE)


def glu(
    gate_up: torch.Tensor,
    activation: Activation,
    *,
    limit: float | None = None,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Gate the second half of the last axis with the activated first half.

    `limit` belongs to `swiglu-clamped` alone and is 7 there if not given.
    """
    check_glu(gate_up, activation, limit)
    if not should_use_triton(backend, gate_up):
        return glu_reference(gate_up, activation, limit=limit)
    bound = DEFAULT_CLAMP_LIMIT if limit is None else limit
    gated: torch.Tensor = apply_autograd(_Glu, gate_up, activation, bound)
    return gated


def glu_reference(
    gate_up: torch.Tensor, activation: Activation, *, limit: float | None = None
) -> torch.Tensor:
    """Do the same with torch operations."""
    exact = gate_up.double() if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = exact.chunk(2, dim=-1)
    if activation == "swiglu-clamped":
        bound = DEFAULT_CLAMP_LIMIT if limit is None else limit
        gate, up = gate.clamp(max=bound), up.clamp(-bound, bound) + 1
    return (activation_reference(gate, activation) * up).to(gate_up.dtype)


def activation_reference(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply an activation by itself; of `swiglu-clamped`, what multiplies up."""
    match activation:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu-tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case "quick-gelu" | "swiglu-clamped":
            return x * torch.sigmoid(QUICK_GELU_SCALE * x)


def check_glu(gate_up: torch.Tensor, activation: str, limit: float | None) -> None:
    """Refuse an activation that is not known, a limit it does not have, and an odd width."""
    problems = []
    if activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        problems.append(
            Problem("activation", f"no activation {activation!r}", f"use one of {known}")
        )
    if limit is not None and activation != "swiglu-clamped":
        what = f"{activation} has no limit, {limit} was given"
        problems.append(Problem("limit", what, "leave it out, or use swiglu-clamped"))
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        what = f"shape {tuple(gate_up.shape)} has no two equal halves"
        problems.append(Problem("gate_up", what, "give the gate's columns, then as many for up"))
    if problems:
        raise InputError(problems)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, activation: Activation, limit: float
    ) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.limit = activation, limit
        return glu_forward(gate_up, activation, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gate_up,) = ctx.saved_tensors
        dgate_up, _ = glu_backward(gate_up, grads[0], ctx.activation, ctx.limit, again=False)
        return dgate_up, None, None


def glu_forward(gate_up: torch.Tensor, activation: Activation, limit: float) -> torch.Tensor:
    """Run the kernel of the forward pass on a contiguous tensor."""
    *leading, both = gate_up.shape
    gated = torch.empty(*leading, both // 2, dtype=gate_up.dtype, device=gate_up.device)
    if gated.numel():
        grid, options = _launch(gated)
        _gate[grid](
            gate_up,
            gated,
            limit,
            ACTIVATION=activation,
            **options,
            **make_pdl_launch_options(gated),
        )
    return gated


def glu_backward(
    gate_up: torch.Tensor,
    dgated: torch.Tensor,
    activation: Activation,
    limit: float,
    *,
    again: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return d(gate_up) and, if requested, the output of `glu_forward`, computed in one pass."""
    dgated = dgated.contiguous()
    dgate_up = torch.empty_like(gate_up)
    gated = torch.empty_like(dgated, dtype=gate_up.dtype) if again else None
    if dgated.numel():
        grid, options = _launch(dgated)
        _ungate[grid](gate_up, dgated, dgate_up, gated, limit, ACTIVATION=activation, **options)
    return dgate_up, gated


def _launch(gated: torch.Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Give each program a tile of a row."""
    width = gated.shape[-1]
    tile = min(TILE, max(16, 1 << (width - 1).bit_length()))
    programs = gated.numel() // width * -(-width // tile)
    return (programs,), {"F": width, "TILE": tile, "num_warps": WARPS}


@triton.jit
def _gate(
    gate_up,
    gated,
    limit,
    ACTIVATION: tl.constexpr,
    F: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row, column = _place(F, TILE)
    inside = column < F
    here = gate_up + row * (2 * F) + column
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + F, mask=inside, other=0.0).to(tl.float32)
    value = activate_and_gate(gate, up, limit, ACTIVATION).to(gated.dtype.element_ty)
    tl.store(gated + row * F + column, value, mask=inside)


@triton.jit
def activate_and_gate(gate, up, limit, ACTIVATION: tl.constexpr):
    """Return activation(gate) · up, for kernels that have both at hand."""
    if ACTIVATION == "swiglu-clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
    value, _ = _activated(gate, ACTIVATION)
    return value * up


@triton.jit
def _ungate(
    gate_up,
    dgated,
    dgate_up,
    gated,
    limit,
    ACTIVATION: tl.constexpr,
    F: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradients of both halves and, where there is room for it, the result again."""
    row, column = _place(F, TILE)
    inside = column < F
    here = row * (2 * F) + column
    gate = tl.load(gate_up + here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + here + F, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dgated + row * F + column, mask=inside, other=0.0).to(tl.float32)
    through = gradient
    if ACTIVATION == "swiglu-clamped":
        # As torch.clamp: a value at the limit still passes its gradient.
        through = tl.where((up >= -limit) & (up <= limit), gradient, 0.0)
        gradient = tl.where(gate <= limit, gradient, 0.0)
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
    value, slope = _activated(gate, ACTIVATION)
    kind = dgate_up.dtype.element_ty
    tl.store(dgate_up + here, (gradient * up * slope).to(kind), mask=inside)
    tl.store(dgate_up + here + F, (through * value).to(kind), mask=inside)
    if gated is not None:
        value = (value * up).to(gated.dtype.element_ty)
        tl.store(gated + row * F + column, value, mask=inside)


@triton.jit
def _place(F: tl.constexpr, TILE: tl.constexpr):
    """Return the row and the columns of this program."""
    tiles: tl.constexpr = (F + TILE - 1) // TILE
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    return row, program % tiles * TILE + tl.arange(0, TILE)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Return the activation's value and its slope; what is not used costs nothing."""
    if ACTIVATION == "silu":
        chance = tl.sigmoid(x)
        value = x * chance
        slope = chance * (1.0 + x * (1.0 - chance))
    elif ACTIVATION == "gelu":
        chance = 0.5 + 0.5 * tl.erf(x * _ROOT_HALF)
        value = x * chance
        slope = chance + x * tl.exp(-0.5 * x * x) * _DENSITY
    elif ACTIVATION == "gelu-tanh":
        # (1 + tanh(u)) / 2 = σ(2u)
        chance = tl.sigmoid((x + 0.044715 * x * x * x) * _TWICE_ROOT)
        inner = (1.0 + 0.134145 * x * x) * _TWICE_ROOT
        value = x * chance
        slope = chance + x * chance * (1.0 - chance) * inner
    elif ACTIVATION == "relu":
        slope = tl.where(x > 0.0, 1.0, 0.0)
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = positive * positive
        slope = 2.0 * positive
    else:
        chance = tl.sigmoid(x * _QUICK)
        value = x * chance
        slope = chance * (1.0 + x * _QUICK * (1.0 - chance))
    return value, slope
