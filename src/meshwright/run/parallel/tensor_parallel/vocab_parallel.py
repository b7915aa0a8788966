"""Words shared by ranks: each looks up, and scores, those whose rows it holds.

The cross-entropy needs three numbers per token from all ranks, the largest logit, Σ exp and the
label's logit; logits themselves never travel. Tokens go through in chunks, as in
`kernels.loss.linear_cross_entropy`, and gradients are formed in the forward pass, where logits are,
in the same formats as there. Where nothing is differentiated, none are.

Letters: B sequences, T positions, N = B·T tokens, D hidden, W words held here.
"""

# Autograd's own functions are untyped, and hand over arguments by position.
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.embedding import embedding
from meshwright.run.kernels.loss.cross_entropy_kernel import CrossEntropyOptions
from meshwright.run.kernels.loss.linear_cross_entropy import (
    CrossEntropySums,
    addmm_fp32_,
    is_weight_grad_rounded,
)
from meshwright.run.kernels.loss.scale_tensor import scale_tensor
from meshwright.run.nn.sharding.shard_spec import split_evenly
from meshwright.run.parallel.autograd_collectives import (
    copy_to_region,
    gather_from_region,
    gather_from_sequence_region,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
)
from meshwright.run.parallel.group_coordinator import GroupCoordinator

MAX_CHUNK_BYTES = 1 << 30
"""Most that the float32 logits of a chunk of tokens take."""
SEQUENCE_DIM = 1
"""The axis of tokens in (B, T, D)."""


class VocabParallel:
    """The embedding and the head of a tensor-parallel group."""

    def __init__(
        self, group: GroupCoordinator, vocab_size: int, *, sequence_parallel: bool
    ) -> None:
        """`sequence_parallel` says that between layers each rank has a share of the tokens."""
        self.group, self.vocab_size, self.sequence_parallel = group, vocab_size, sequence_parallel
        self.local_range = split_evenly(vocab_size, group.size, group.index)
        self.max_local_rows = split_evenly(vocab_size, group.size, 0).size

    def lookup(self, numbers_BT: Tensor, weight_WD: Tensor) -> Tensor:
        """Return the vectors of words, or this rank's tokens of them."""
        local = numbers_BT - self.local_range.start
        mine = (local >= 0) & (local < self.local_range.size)
        if self.local_range.size:
            found = embedding(local.masked_fill(~mine, 0), weight_WD) * mine[..., None]
        else:  # more ranks than words: it takes part in the sum and adds nothing
            found = weight_WD.new_zeros(*numbers_BT.shape, weight_WD.shape[1]) + weight_WD.sum()
        return (
            reduce_scatter_to_sequence_region(found, self.group, SEQUENCE_DIM)
            if self.sequence_parallel
            else reduce_from_region(found, self.group)
        )

    def lookup_sequence_shard(self, numbers_BT: Tensor, weight: Tensor) -> Tensor:
        """Return the rows of a table that every rank holds, for this rank's tokens."""
        numbers = numbers_BT.chunk(self.group.size, -1)[self.group.index]
        return embedding(numbers, weight)

    def loss(
        self,
        x_BTD: Tensor,
        labels_BT: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: CrossEntropyOptions,
    ) -> CrossEntropySums:
        """Return the summed cross-entropy over all words."""
        x_ND = self._whole(x_BTD).flatten(0, 1)
        given = (x_ND, weight, bias)
        # Inside of `apply` nothing tells whether a gradient is wanted.
        learns = torch.is_grad_enabled()
        needs = tuple(learns and each is not None and each.requires_grad for each in given)
        nats, z = _SharedCrossEntropy.apply(*given, labels_BT.flatten(), rule, self, needs)
        return CrossEntropySums(nats, (labels_BT != rule.ignore_index).sum(), z)

    def logits(self, x_BTD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the products with all words, on every rank."""
        here = functional.linear(self._whole(x_BTD), weight, bias)
        padded = functional.pad(here, (0, self.max_local_rows - self.local_range.size))
        return gather_from_region(padded, self.group, padded.dim() - 1)[..., : self.vocab_size]

    def _whole(self, x_BTD: Tensor) -> Tensor:
        if self.sequence_parallel:
            return gather_from_sequence_region(x_BTD, self.group, SEQUENCE_DIM)
        return copy_to_region(x_BTD, self.group)


class _SharedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        labels_N: Tensor,
        rule: CrossEntropyOptions,
        words: VocabParallel,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        weight = weight_WD.to(x_ND.dtype)
        bias = None if bias_W is None else bias_W.float()
        dx_ND = torch.empty_like(x_ND) if needs[0] else None
        dw_WD: Tensor | None = None
        db_W = torch.zeros_like(bias) if needs[2] and bias is not None else None
        nats = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        z = torch.zeros_like(nats)
        # The same on all ranks, whoever has a word less: chunks are what they talk about.
        most = max(1, MAX_CHUNK_BYTES // (4 * words.max_local_rows))
        for first in range(0, len(x_ND), most):
            rows = slice(first, first + most)
            logits = (x_ND[rows] @ weight.t()).float()
            if bias is not None:
                logits += bias
            turned = _turn(logits, labels_N[rows], rule, words, sloped=any(needs))
            nats += turned.nats
            z += turned.z
            if turned.slope is None:
                continue
            slope = turned.slope.to(x_ND.dtype)
            if dx_ND is not None:
                dx_ND[rows] = slope @ weight
            if needs[1] and most >= len(x_ND) and is_weight_grad_rounded(weight_WD, x_ND):
                dw_WD = slope.t() @ x_ND
            elif needs[1]:
                dw_WD = addmm_fp32_(dw_WD, slope.t(), x_ND[rows])
            if db_W is not None:
                db_W += turned.slope.sum(0)
        if needs[1] and dw_WD is None:  # of no token
            dw_WD = torch.zeros_like(weight)
        ctx.save_for_backward(dx_ND, dw_WD, db_W)
        ctx.dtypes = (
            x_ND.dtype,
            get_grad_dtype(weight_WD),
            None if bias_W is None else get_grad_dtype(bias_W),
        )
        ctx.mark_non_differentiable(z)
        return nats, z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        grads = [
            None if saved is None else scale_tensor(saved, grad, dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


class _Turned:
    """What a chunk of tokens costs, and the gradient of that by its logits."""

    def __init__(self, nats: Tensor, z: Tensor, slope: Tensor | None) -> None:
        self.nats, self.z, self.slope = nats, z, slope


def _turn(
    raw_NW: Tensor,
    labels_N: Tensor,
    rule: CrossEntropyOptions,
    words: VocabParallel,
    *,
    sloped: bool,
) -> _Turned:
    """Return the loss of a chunk over all ranks' words, and the gradient of those held here."""
    group, held = words.group, words.local_range
    logits = raw_NW if rule.scale is None else raw_NW * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    valid = labels_N != rule.ignore_index
    local = labels_N - held.start
    mine = valid & (local >= 0) & (local < held.size)
    largest = logits.amax(1) if held.size else logits.new_full((len(logits),), -torch.inf)
    largest = group.all_reduce(largest, "max")
    powers = torch.exp(logits - largest[:, None])
    chosen = local.masked_fill(~mine, 0)[:, None]
    at_label = logits.gather(1, chosen)[:, 0] if held.size else largest
    sums = torch.stack([powers.sum(1), at_label.masked_fill(~mine, 0.0), mine.to(powers.dtype)])
    total, at_label, holders = group.all_reduce(sums)
    lse = largest + total.log()
    # A label that no rank holds is no word.
    costs = torch.where((holders > 0) | ~valid, lse - at_label, torch.nan)
    nats = costs.masked_fill(~valid, 0.0).sum()
    z = rule.z_loss * lse.masked_fill(~valid, 0.0).square().sum()
    if not sloped:
        return _Turned(nats, z, None)
    slope = powers / total[:, None]
    if rule.z_loss:
        slope = slope * (1 + 2 * rule.z_loss * lse)[:, None]
    if held.size:
        slope.scatter_add_(1, chosen, -mine.to(slope.dtype)[:, None])
    if rule.softcap is not None:
        slope = slope * (1 - (logits / rule.softcap).square())
    if rule.scale is not None:
        slope = slope * rule.scale
    return _Turned(nats, z, slope * valid[:, None])
