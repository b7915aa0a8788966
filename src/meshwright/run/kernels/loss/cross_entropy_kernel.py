"""Rows of logits turned into their losses and, in place, into the gradients of those losses.

One program takes one row: it reads it once for log Σ exp, and a second time, from a cache, to write
the gradient over it. What is left of a row behind its last whole pair of tiles stays in registers
meanwhile. Bytes moved, the floor: each logit in, each gradient out.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

import math
from typing import NamedTuple

import torch

from meshwright.run.kernels.triton_compat import tl, triton

BLOCK = 16384
"""Logits of one tile: two accesses of 16 bytes per thread, in bfloat16."""
WARPS = 32
"""They fill a multiprocessor's registers, so that each has one row under way: 132 rows of 128k
logits are 34 MB, what the second-level cache of an H200 can hold; with two rows each the second
read would go to the memory again (measured: 66 % of the copy bandwidth, which is 2 of 3 passes)."""
_LANE = tl.constexpr(8)
"""Logits a thread holds side by side: 16 bytes of bfloat16, with a maximum of their own."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-1.0e30)
"""Where running maxima begin: finite, so that no difference of two of them is NaN."""


class CrossEntropyOptions(NamedTuple):
    """How logits become a loss."""

    ignore_index: int
    """The label of tokens that do not count."""
    softcap: float | None
    """Logits become softcap · tanh(logits / softcap); None leaves them."""
    scale: float | None
    """Factor of the logits, before the cap."""
    z_loss: float
    """Factor of log²Σexp, added to what is differentiated."""


def cross_entropy_rows_reference_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    nats: torch.Tensor,
    lse: torch.Tensor,
    rule: CrossEntropyOptions,
    gradient: bool,
) -> None:
    """Do with torch what `cross_entropy_rows_` does."""
    wide = logits.float()
    wide = wide if rule.scale is None else wide * rule.scale
    wide = wide if rule.softcap is None else rule.softcap * torch.tanh(wide / rule.softcap)
    valid = labels != rule.ignore_index
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


def cross_entropy_rows_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    nats: torch.Tensor,
    lse: torch.Tensor,
    rule: CrossEntropyOptions,
    gradient: bool,
    block: int = BLOCK,
    warps: int = WARPS,
) -> None:
    """Write each row's loss and log Σ exp, and its gradient over its logits where asked."""
    rows, vocab = logits.shape
    if not rows:
        return
    block = max(256, min(block, 1 << int(math.log2(vocab))))
    _turn_row[(rows,)](
        logits,
        labels,
        nats,
        lse,
        logits.stride(0),
        vocab,
        rule.ignore_index,
        1.0 if rule.scale is None else rule.scale,
        1.0 if rule.softcap is None else rule.softcap,
        rule.z_loss,
        SCALED=rule.scale is not None,
        CAPPED=rule.softcap is not None,
        STEEP=rule.z_loss != 0.0,
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
    STEEP: tl.constexpr,
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
    # Tiles go in pairs, so that a thread's loads overlap. Whole pairs need no mask; what remains
    # is read first, before anything is known of the label, and stays in registers.
    whole = vocab // (2 * block) * (2 * block)
    here_rests = whole + lane < vocab
    there_rests = whole + block + lane < vocab
    one_rest = tl.load(logits + whole + lane, mask=here_rests, other=0.0)
    two_rest = tl.load(logits + whole + block + lane, mask=there_rests, other=0.0)
    if label == ignore:
        _ignore(logits, nats + row, lse + row, vocab, GRADIENT, GROUPS)
    else:
        known = (label >= 0) & (label < vocab)
        at_label = tl.load(logits + label, mask=known, other=float("nan"))
        at_label = _shaped(at_label.to(tl.float32), scale, softcap, SCALED, CAPPED)
        largest = tl.full((GROUPS,), _LEAST, tl.float32)
        total = tl.zeros((GROUPS,), tl.float32)
        for start in range(0, whole, 2 * block):
            here = logits + start + lane
            one = tl.load(here, eviction_policy="evict_last")
            two = tl.load(here + block, eviction_policy="evict_last")
            largest, total = _include(largest, total, one, None, scale, softcap, SCALED, CAPPED)
            largest, total = _include(largest, total, two, None, scale, softcap, SCALED, CAPPED)
        largest, total = _include(
            largest, total, one_rest, here_rests, scale, softcap, SCALED, CAPPED
        )
        largest, total = _include(
            largest, total, two_rest, there_rests, scale, softcap, SCALED, CAPPED
        )
        most = tl.max(largest, axis=0)
        row_lse = most + tl.log(tl.sum(total * tl.exp2((largest - most) * _LOG2_E), axis=0))
        tl.store(nats + row, row_lse - at_label)
        tl.store(lse + row, row_lse)
        if GRADIENT:
            # Every thread must have read the label's logit before any thread overwrites it.
            tl.debug_barrier()
            steep = 1.0 + 2.0 * z_loss * row_lse
            shift = row_lse * _LOG2_E
            _turn(
                logits + whole + lane, one_rest, here_rests,
                shift, steep, scale, softcap, SCALED, CAPPED, STEEP,
            )  # fmt: skip
            _turn(
                logits + whole + block + lane, two_rest, there_rests,
                shift, steep, scale, softcap, SCALED, CAPPED, STEEP,
            )  # fmt: skip
            for start in range(0, whole, 2 * block):
                here = logits + start + lane
                one = tl.load(here, eviction_policy="evict_first")
                two = tl.load(here + block, eviction_policy="evict_first")
                _turn(here, one, None, shift, steep, scale, softcap, SCALED, CAPPED, STEEP)
                _turn(here + block, two, None, shift, steep, scale, softcap, SCALED, CAPPED, STEEP)
            # The label's own gradient is less by one; the barrier keeps it from being overtaken.
            tl.debug_barrier()
            slope = tl.exp2(at_label * _LOG2_E - shift) * steep - 1.0
            slope *= _bend(at_label, scale, softcap, SCALED, CAPPED)
            tl.store(logits + label, slope.to(logits.dtype.element_ty), mask=known)


@triton.jit
def _shaped(value, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Scale and cap a logit; tanh(a) is 2·sigmoid(2a) - 1."""
    if SCALED:
        value = value * scale
    if CAPPED:
        value = softcap * (2.0 / (1.0 + tl.exp2(value * (-2.0 * _LOG2_E) / softcap)) - 1.0)
    return value


@triton.jit
def _include(
    largest, total, raw, inside, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr
):
    """Take further logits into running maxima and into sums of exponentials relative to them."""
    value = _shaped(raw.to(tl.float32), scale, softcap, SCALED, CAPPED)
    if inside is not None:
        value = tl.where(inside, value, float("-inf"))
    higher = tl.maximum(largest, tl.max(value, axis=1))
    terms = tl.exp2(value * _LOG2_E - (higher * _LOG2_E)[:, None])
    return higher, total * tl.exp2((largest - higher) * _LOG2_E) + tl.sum(terms, axis=1)


@triton.jit
def _ignore(logits, nats, lse, vocab, GRADIENT: tl.constexpr, GROUPS: tl.constexpr):
    """Write noughts for a row that does not count."""
    tl.store(nats, 0.0)
    tl.store(lse, 0.0)
    if GRADIENT:
        lane = tl.arange(0, GROUPS)[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
        nothing = tl.zeros((GROUPS, _LANE), logits.dtype.element_ty)
        for start in range(0, vocab, GROUPS * _LANE):
            tl.store(logits + start + lane, nothing, mask=start + lane < vocab)


@triton.jit
def _turn(
    here,
    raw,
    inside,
    shift,
    steep,
    scale,
    softcap,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    STEEP: tl.constexpr,
):
    """Write d loss / d logit, but for the label: softmax, through the cap and the scale."""
    value = _shaped(raw.to(tl.float32), scale, softcap, SCALED, CAPPED)
    slope = tl.exp2(value * _LOG2_E - shift)
    if STEEP:
        slope *= steep
    if SCALED or CAPPED:
        slope *= _bend(value, scale, softcap, SCALED, CAPPED)
    slope = slope.to(here.dtype.element_ty)
    tl.store(here, slope, mask=inside, eviction_policy="evict_first")


@triton.jit
def _bend(value, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Return d(shaped logit) / d logit, given the shaped one."""
    bend = 1.0
    if CAPPED:
        bend = 1.0 - (value / softcap) * (value / softcap)
    if SCALED:
        bend = bend * scale
    return bend
