"""Rows of logits turned into their losses and, in place, into the gradients of those losses.

One program takes one row: it reads it once for log Σ exp, and a second time, from the second-level
cache, to write the gradient over it. Bytes moved, the floor: each logit in, each gradient out.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

import math
from typing import NamedTuple

import torch

from meshwright.run.kernels.language import tl, triton

BLOCK = 8192
"""Logits a program holds at a time."""
WARPS = 16
"""Two programs of 16 warps share a multiprocessor: one computes while the other loads."""
_LANE = tl.constexpr(8)
"""Logits a thread holds side by side: 16 bytes of bfloat16, with a maximum of their own."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-1.0e30)
"""Where running maxima begin: finite, so that no difference of two of them is NaN."""


class LossRule(NamedTuple):
    """How logits become a loss."""

    ignore: int
    """The label of tokens that do not count."""
    softcap: float | None
    """Logits become softcap · tanh(logits / softcap); None leaves them."""
    scale: float | None
    """Factor of the logits, before the cap."""
    z_loss: float
    """Factor of log²Σexp, added to what is differentiated."""


def plain_turn_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    nats: torch.Tensor,
    lse: torch.Tensor,
    rule: LossRule,
    gradient: bool,
) -> None:
    """Do with torch what `turn_rows` does."""
    wide = logits.float()
    wide = wide if rule.scale is None else wide * rule.scale
    wide = wide if rule.softcap is None else rule.softcap * torch.tanh(wide / rule.softcap)
    valid = labels != rule.ignore
    chosen = labels.masked_fill(~valid, 0).unsqueeze(1)
    row_lse = torch.logsumexp(wide, dim=1)
    lse.copy_(row_lse.masked_fill(~valid, 0.0))
    nats.copy_((row_lse - wide.gather(1, chosen).squeeze(1)).masked_fill(~valid, 0.0))
    if not gradient:
        return
    slope = torch.exp(wide - row_lse.unsqueeze(1))
    if rule.z_loss:
        slope.mul_((1 + 2 * rule.z_loss * row_lse).unsqueeze(1))
    slope.scatter_add_(1, chosen, torch.full_like(chosen, -1.0, dtype=slope.dtype))
    if rule.softcap is not None:
        slope.mul_(1 - (wide / rule.softcap).square())
    slope.mul_(valid.unsqueeze(1) * (1.0 if rule.scale is None else rule.scale))
    logits.copy_(slope)


def turn_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    nats: torch.Tensor,
    lse: torch.Tensor,
    rule: LossRule,
    gradient: bool,
    block: int = BLOCK,
    warps: int = WARPS,
) -> None:
    """Write each row's loss and log Σ exp, and its gradient over its logits where asked."""
    rows, vocab = logits.shape
    if not rows:
        return
    block = max(256, min(block, 1 << math.ceil(math.log2(vocab))))
    _turn_row[(rows,)](
        logits,
        labels,
        nats,
        lse,
        logits.stride(0),
        vocab,
        rule.ignore,
        1.0 if rule.scale is None else rule.scale,
        1.0 if rule.softcap is None else rule.softcap,
        rule.z_loss,
        SCALED=rule.scale is not None,
        CAPPED=rule.softcap is not None,
        GRADIENT=gradient,
        GROUPS=block // 8,
        num_warps=max(1, min(warps, block // 256)),
    )


@triton.jit
def _turn_row(
    logits,
    labels,
    nats,
    lse,
    stride,
    vocab,
    ignore,
    scale,
    softcap,
    z_loss,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Read a row of logits twice: first for log Σ exp, then to write the gradient over it."""
    block: tl.constexpr = GROUPS * _LANE
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    label = tl.load(labels + row).to(tl.int32)
    # A tile is [GROUPS, 8]: a thread's eight logits share one running maximum, so that each logit
    # costs one exponential and no program-wide reduction happens inside the loop.
    lane = tl.arange(0, GROUPS)[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
    whole = vocab // block * block
    if label == ignore:
        tl.store(nats + row, 0.0)
        tl.store(lse + row, 0.0)
        if GRADIENT:
            nothing = tl.zeros((GROUPS, _LANE), logits.dtype.element_ty)
            for start in range(0, vocab, block):
                tl.store(logits + start + lane, nothing, mask=start + lane < vocab)
    else:
        largest = tl.full((GROUPS,), _LEAST, tl.float32)
        total = tl.zeros((GROUPS,), tl.float32)
        for start in range(0, whole, block):
            value = tl.load(logits + start + lane, eviction_policy="evict_last").to(tl.float32)
            value = _shaped(value, scale, softcap, SCALED, CAPPED)
            largest, total = _include(largest, total, value)
        if whole < vocab:
            inside = whole + lane < vocab
            value = tl.load(logits + whole + lane, mask=inside, other=0.0).to(tl.float32)
            value = _shaped(value, scale, softcap, SCALED, CAPPED)
            largest, total = _include(largest, total, tl.where(inside, value, float("-inf")))
        most = tl.max(largest, axis=0)
        row_lse = most + tl.log(tl.sum(total * tl.exp2((largest - most) * _LOG2_E), axis=0))
        known = (label >= 0) & (label < vocab)
        at_label = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        tl.store(nats + row, row_lse - _shaped(at_label, scale, softcap, SCALED, CAPPED))
        tl.store(lse + row, row_lse)
        if GRADIENT:
            # Every thread must have read the label's logit before any thread overwrites it.
            tl.debug_barrier()
            steep = 1.0 + 2.0 * z_loss * row_lse
            for start in range(0, whole, block):
                here = logits + start + lane
                value = tl.load(here, eviction_policy="evict_first").to(tl.float32)
                slope = _slope(
                    value, start + lane == label, row_lse, steep, scale, softcap, SCALED, CAPPED
                )
                tl.store(here, slope.to(logits.dtype.element_ty), eviction_policy="evict_first")
            if whole < vocab:
                here = logits + whole + lane
                inside = whole + lane < vocab
                value = tl.load(here, mask=inside, other=0.0).to(tl.float32)
                slope = _slope(
                    value, whole + lane == label, row_lse, steep, scale, softcap, SCALED, CAPPED
                )
                tl.store(here, slope.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _shaped(value, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Scale and cap a logit; tanh(a) is 2·sigmoid(2a) - 1."""
    if SCALED:
        value = value * scale
    if CAPPED:
        value = softcap * (2.0 / (1.0 + tl.exp2(value * (-2.0 * _LOG2_E) / softcap)) - 1.0)
    return value


@triton.jit
def _include(largest, total, value):
    """Take further logits into running maxima and into sums of exponentials relative to them."""
    higher = tl.maximum(largest, tl.max(value, axis=1))
    terms = tl.exp2((value - higher[:, None]) * _LOG2_E)
    return higher, total * tl.exp2((largest - higher) * _LOG2_E) + tl.sum(terms, axis=1)


@triton.jit
def _slope(
    value, is_label, row_lse, steep, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr
):
    """Return d loss / d logit: softmax, less one at the label, through the cap and the scale."""
    value = _shaped(value, scale, softcap, SCALED, CAPPED)
    slope = tl.exp2((value - row_lse) * _LOG2_E) * steep - tl.where(is_label, 1.0, 0.0)
    if CAPPED:
        slope *= 1.0 - (value / softcap) * (value / softcap)
    if SCALED:
        slope *= scale
    return slope
