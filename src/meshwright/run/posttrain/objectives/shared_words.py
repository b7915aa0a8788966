"""Log-probabilities of given words where ranks hold some rows of the output head each.

Three numbers per token, the largest logit, Σ exp and the logits of the words, are put together over
the ranks, and a fourth where entropies are asked for; logits never travel. They are made again in
backward, some tokens at a time, so no more than a piece of them is ever held.

Shapes: N tokens, D hidden, W words held here, K words asked for.
"""

# Autograd's own functions are untyped, and hand over arguments by position.
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.run.kernels.gradient_format import gradient_format
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.kernels.linear_cross_entropy import add_product
from meshwright.run.parallel.flow import copy_in
from meshwright.run.parallel.vocabulary import WordsOfRanks

CHUNK_BYTES = 1 << 28
"""Most that the logits of a piece take."""
WIDE = torch.float32
"""Format of logits and of what is found."""


class SharedWords(NamedTuple):
    """What the model thinks of given words, the same on all ranks."""

    logprobs: Tensor
    """[N, K]; 0 for words that are `IGNORED`."""
    entropy: Tensor | None
    """[N], of the whole distribution, in nats; without gradients."""


class _Rule(NamedTuple):
    words: WordsOfRanks
    softcap: float | None
    scale: float | None
    entropy: bool = False

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
        raw = (x_ND @ weight_WD.t()).to(WIDE)
        return self.shaped(raw if bias_W is None else raw + bias_W.to(raw.dtype))

    def pieces(self, x_ND: Tensor) -> list[slice]:
        # The same on all ranks, whoever has a word less: pieces are what they talk about.
        each = WIDE.itemsize * self.words.most_held
        most = max(1, CHUNK_BYTES // each)
        return [slice(at, at + most) for at in range(0, len(x_ND), most)]

    def local(self, words_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of words in what is held here, and which of them are."""
        held = self.words.held
        local = words_NK - held.start
        mine = (words_NK != IGNORED) & (local >= 0) & (local < held.size)
        return local.masked_fill(~mine, 0), mine


def shared_word_logprobs(
    words: WordsOfRanks,
    x_ND: Tensor,
    weight_WD: Tensor,
    bias_W: Tensor | None,
    words_NK: Tensor,
    *,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return log p of K words for every token, the same on all ranks; 0 where they are `IGNORED`.

    All ranks have all of `x_ND`, and its whole gradient afterwards.
    """
    given = (words, x_ND, weight_WD, bias_W, words_NK)
    return shared_words(*given, softcap=softcap, scale=scale).logprobs


def shared_words(
    words: WordsOfRanks,
    x_ND: Tensor,
    weight_WD: Tensor,
    bias_W: Tensor | None,
    words_NK: Tensor,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    entropy: bool = False,
) -> SharedWords:
    """Return the same, and the entropy of every token if asked."""
    given = (copy_in(x_ND, words.group), weight_WD, bias_W)
    found, spread = _SharedWords.apply(*given, words_NK, _Rule(words, softcap, scale, entropy))
    return SharedWords(found, spread if entropy else None)


class _SharedWords(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        words_NK: Tensor,
        rule: _Rule,
    ) -> tuple[Tensor, Tensor]:
        formats = (weight_WD, bias_W)
        ctx.formats = (
            x_ND.dtype,
            *(None if one is None else gradient_format(one) for one in formats),
        )
        weight_WD = weight_WD.to(x_ND.dtype)
        group = rule.words.group
        found = x_ND.new_zeros(words_NK.shape, dtype=WIDE)
        lse = x_ND.new_zeros(len(x_ND), dtype=WIDE)
        spread = lse.new_zeros(len(x_ND) if rule.entropy else 0)
        for part in rule.pieces(x_ND):
            shaped = rule.logits(x_ND[part], weight_WD, bias_W)
            largest = shaped.new_full((len(shaped),), -torch.inf)
            if rule.words.held.size:
                largest = shaped.amax(1)
            largest = group.all_reduce(largest, "max")
            less = shaped - largest[:, None]
            powers = less.exp()
            total = powers.sum(1, keepdim=True)
            local, mine = rule.local(words_NK[part])
            chosen = torch.zeros_like(local, dtype=WIDE)
            if rule.words.held.size:
                chosen = shaped.gather(1, local).masked_fill(~mine, 0)
            columns = [total, chosen, mine.to(WIDE)]
            if rule.entropy:
                columns.append((powers * less).sum(1, keepdim=True))
            sums = group.all_reduce(torch.cat(columns, 1))
            total, chosen, holders, *more = sums.split([each.shape[1] for each in columns], 1)
            for weighed in more:
                # H is log Σ exp z less the mean of z, both less the largest.
                spread[part] = (total.log() - weighed / total)[:, 0]
            lse[part] = largest + total[:, 0].log()
            logprobs = chosen - lse[part, None]
            # A word that no rank holds is none.
            logprobs = torch.where(holders > 0, logprobs, torch.nan)
            found[part] = logprobs.masked_fill(words_NK[part] == IGNORED, 0)
        ctx.save_for_backward(x_ND, weight_WD, bias_W, words_NK, lse)
        ctx.rule = rule
        ctx.mark_non_differentiable(spread)
        return found, spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, _: Tensor) -> Any:
        x_ND, weight_WD, bias_W, words_NK, lse = ctx.saved_tensors
        rule: _Rule = ctx.rule
        of_logprobs = of_logprobs.masked_fill(words_NK == IGNORED, 0)
        dx = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight_WD, dtype=WIDE) if ctx.needs_input_grad[1] else None
        db = torch.zeros_like(bias_W, dtype=WIDE) if ctx.needs_input_grad[2] else None
        for part in rule.pieces(x_ND):
            shaped = rule.logits(x_ND[part], weight_WD, bias_W)
            # d log p_k / d z_j is [j = k] - p_j.
            slope = (shaped - lse[part, None]).exp() * -of_logprobs[part].sum(1, keepdim=True)
            if rule.words.held.size:
                local, mine = rule.local(words_NK[part])
                slope.scatter_add_(1, local, of_logprobs[part] * mine)
            slope = rule.bent(slope, shaped)
            narrow = slope.to(x_ND.dtype)
            if dx is not None:
                dx[part] = narrow @ weight_WD
            if dw is not None:
                dw = add_product(dw, narrow.t(), x_ND[part])
            if db is not None:
                db += slope.sum(0)
        grads = [
            None if one is None else one.to(dtype)
            for one, dtype in zip((dx, dw, db), ctx.formats, strict=True)
        ]
        return (*grads, None, None)
