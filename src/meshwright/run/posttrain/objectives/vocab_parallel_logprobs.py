"""Log-probabilities of given words where ranks hold some rows of the output head each.

Few numbers per token, the largest logit, Σ exp and the logits of the words, are put together over
the ranks; logits never travel. They are made again in backward, some tokens at a time, so no more
than a piece of them is ever held.

Shapes: N tokens, D hidden, W words held here, K words asked for.
"""

# Autograd's own functions are untyped, and hand over arguments by position.
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.loss.linear_cross_entropy import addmm_fp32_
from meshwright.run.parallel.autograd_collectives import copy_to_region
from meshwright.run.parallel.tensor_parallel.vocab_parallel import VocabParallel
from meshwright.run.posttrain.objectives.masked_logits import finite_logsumexp, mask_tokens
from meshwright.run.posttrain.objectives.token_logprobs import TokenLogprobs

CHUNK_BYTES = 1 << 28
"""Most that the logits of a piece take."""
ACCUMULATION_DTYPE = torch.float32
"""Format of logits and of what is found."""


class _Rule(NamedTuple):
    words: VocabParallel
    softcap: float | None
    scale: float | None
    rest: bool
    entropy: bool

    def shaped(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale is None else logits * self.scale
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def bent(self, slope: Tensor, shaped: Tensor) -> Tensor:
        """Carry a gradient of shaped logits back to the logits."""
        if self.softcap is not None:
            slope = slope * (1 - (shaped / self.softcap).square())
        return slope if self.scale is None else slope * self.scale

    def logits(self, x_ND: Tensor, weight_WD: Tensor, bias_W: Tensor | None) -> Tensor:
        raw = (x_ND @ weight_WD.t()).to(ACCUMULATION_DTYPE)
        return self.shaped(raw if bias_W is None else raw + bias_W.to(raw.dtype))

    def pieces(self, x_ND: Tensor) -> list[slice]:
        # The same on all ranks, whoever has a word less: pieces are what they talk about.
        each = ACCUMULATION_DTYPE.itemsize * self.words.max_local_rows
        most = max(1, CHUNK_BYTES // each)
        return [slice(at, at + most) for at in range(0, len(x_ND), most)]

    def local(self, words_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of words in what is held here, and which of them are."""
        held = self.words.local_range
        local = words_NK - held.start
        mine = (words_NK != IGNORE_INDEX) & (local >= 0) & (local < held.size)
        return local.masked_fill(~mine, 0), mine


def compute_vocab_parallel_logprobs(
    vocab_parallel: VocabParallel,
    x_ND: Tensor,
    weight_WD: Tensor,
    bias_W: Tensor | None,
    words_NK: Tensor,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    rest: bool = False,
    entropy: bool = False,
) -> TokenLogprobs:
    """Return log p of K words for every token, if asked that of all others, the same on all ranks.

    All ranks have all of `x_ND`, and its whole gradient afterwards. Entropies have no gradients.
    """
    given = (copy_to_region(x_ND, vocab_parallel.group), weight_WD, bias_W)
    rule = _Rule(vocab_parallel, softcap, scale, rest, entropy)
    found, others, spread = _SharedWords.apply(*given, words_NK, rule)
    return TokenLogprobs(found, spread if entropy else None, others if rest else None)


class _SharedWords(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        words_NK: Tensor,
        rule: _Rule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        formats = (weight_WD, bias_W)
        ctx.formats = (
            x_ND.dtype,
            *(None if one is None else get_grad_dtype(one) for one in formats),
        )
        weight_WD = weight_WD.to(x_ND.dtype)
        group, count = rule.words.group, words_NK.shape[1]
        found = x_ND.new_zeros(words_NK.shape, dtype=ACCUMULATION_DTYPE)
        # Of all words, and of those that are not given.
        lse_2N = x_ND.new_zeros(1 + rule.rest, len(x_ND), dtype=ACCUMULATION_DTYPE)
        spread = found.new_zeros(len(x_ND) if rule.entropy else 0)
        for part in rule.pieces(x_ND):
            shaped = rule.logits(x_ND[part], weight_WD, bias_W)
            local, mine = rule.local(words_NK[part])
            chosen = torch.zeros_like(local, dtype=ACCUMULATION_DTYPE)
            if rule.words.local_range.size:
                chosen = shaped.gather(1, local).masked_fill(~mine, 0)
            largest = [_largest(shaped)]
            if rule.rest:
                with mask_tokens(shaped, local, mine):
                    largest.append(_largest(shaped))
            largest_2N = finite_logsumexp(group.all_reduce(torch.stack(largest), "max"))
            total = [_total(shaped, largest_2N[0])]
            if rule.rest:
                with mask_tokens(shaped, local, mine):
                    total.append(_total(shaped, largest_2N[1]))
            if rule.entropy:
                less = shaped - largest_2N[0, :, None]
                weighed = (less.exp() * less).sum(1, keepdim=True)
            else:
                weighed = chosen[:, :0]
            sums = group.all_reduce(
                torch.cat([*total, chosen, mine.to(ACCUMULATION_DTYPE), weighed], 1)
            )
            totals, chosen, holders, weighed = sums.split(
                [len(total), count, count, rule.entropy], 1
            )
            if rule.entropy:
                # H is log Σ exp z less the mean of z, both less the largest.
                spread[part] = totals[:, 0].log() - weighed[:, 0] / totals[:, 0]
            lse_2N[:, part] = largest_2N + totals.t().log()
            logprobs = chosen - lse_2N[0, part, None]
            # A word that no rank holds is none.
            logprobs = torch.where(holders > 0, logprobs, torch.nan)
            found[part] = logprobs.masked_fill(words_NK[part] == IGNORE_INDEX, 0)
        ctx.save_for_backward(x_ND, weight_WD, bias_W, words_NK, lse_2N)
        ctx.rule = rule
        ctx.mark_non_differentiable(spread)
        return found, lse_2N[1] - lse_2N[0] if rule.rest else found.new_zeros(0), spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_rest: Tensor, _: Tensor) -> Any:
        x_ND, weight_WD, bias_W, words_NK, lse_2N = ctx.saved_tensors
        rule: _Rule = ctx.rule
        of_logprobs = of_logprobs.masked_fill(words_NK == IGNORE_INDEX, 0)
        of_all = of_logprobs.sum(1, keepdim=True)
        of_all = of_all + of_rest[:, None] if rule.rest else of_all
        dx = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        dw = (
            torch.zeros_like(weight_WD, dtype=ACCUMULATION_DTYPE)
            if ctx.needs_input_grad[1]
            else None
        )
        db = torch.zeros_like(bias_W, dtype=ACCUMULATION_DTYPE) if ctx.needs_input_grad[2] else None
        for part in rule.pieces(x_ND):
            shaped = rule.logits(x_ND[part], weight_WD, bias_W)
            # d log p_k / d z_j is [j = k] - p_j, and that of all others' [j is other] q_j - p_j.
            slope = (shaped - lse_2N[0, part, None]).exp() * -of_all[part]
            local, mine = rule.local(words_NK[part])
            if rule.words.local_range.size:
                slope.scatter_add_(1, local, of_logprobs[part] * mine)
            if rule.rest:
                with mask_tokens(shaped, local, mine):
                    of_others = (shaped - finite_logsumexp(lse_2N[1, part, None])).exp_()
                slope.addcmul_(of_others, of_rest[part, None])
            slope = rule.bent(slope, shaped)
            narrow = slope.to(x_ND.dtype)
            if dx is not None:
                dx[part] = narrow @ weight_WD
            if dw is not None:
                dw = addmm_fp32_(dw, narrow.t(), x_ND[part])
            if db is not None:
                db += slope.sum(0)
        grads = [
            None if one is None else one.to(dtype)
            for one, dtype in zip((dx, dw, db), ctx.formats, strict=True)
        ]
        return (*grads, None, None)


def _largest(logits_NW: Tensor) -> Tensor:
    """Return the largest logit of each token; -inf where no words are held."""
    if not logits_NW.shape[1]:
        return logits_NW.new_full((len(logits_NW),), -torch.inf)
    return logits_NW.amax(1)


def _total(logits_NW: Tensor, largest_N: Tensor) -> Tensor:
    """Return Σ exp of each token, [N, 1], as seen from its largest logit on any rank."""
    return (logits_NW - largest_N[:, None]).exp_().sum(1, keepdim=True)
