"""Log-probabilities of given words, and entropies, from hidden vectors without all logits at once.

Logits are made for a piece of the tokens at a time, and made again in the backward pass, once it is
known how much each token counts. One word per token goes through the rows of
`kernels.loss.cross_entropy_kernel`; all else (several words, entropies, float64) goes through
torch, a piece at a time.

Memory, the floor: one piece of logits, and the weight's gradient in float32.

Shape letters: N tokens, D hidden, V vocabulary, K words per token.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.gemm.gemm import TORCH_GEMM, GemmBackend
from meshwright.run.kernels.loss.cross_entropy_kernel import (
    CrossEntropyOptions,
    cross_entropy_rows_,
    cross_entropy_rows_reference_,
)
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.loss.linear_cross_entropy import addmm_fp32_, get_default_chunk_bytes
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton
from meshwright.run.posttrain.objectives.masked_logits import finite_logsumexp, mask_tokens

_COPIES = 3
"""Copies of a piece, in the wide format, that torch holds at once."""


class TokenLogprobs(NamedTuple):
    """What the model thinks of given words."""

    logprobs: Tensor
    """[N, K], float32 (float64 for such vectors); 0 for words that are `IGNORE_INDEX`."""
    entropy: Tensor | None
    """[N], of the whole distribution, in nats."""
    other_logprobs: Tensor | None = None
    """[N], log p of all words together that are not given; -inf where there is none."""


def compute_selected_logprobs(
    x_ND: Tensor,
    weight_VD: Tensor,
    words_N: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
    gemm: GemmBackend = TORCH_GEMM,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Return log p of one word for every token, [N]; 0 for those that are `IGNORE_INDEX`."""
    rule = _Rule(softcap, scale, temperature)
    task = _Task(rule, False, False, chunk_bytes, gemm, backend)
    return _words(x_ND, weight_VD, bias, words_N.unsqueeze(-1), task).logprobs.squeeze(-1)


def compute_token_logprobs(
    x_ND: Tensor,
    weight_VD: Tensor,
    words_NK: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    rest: bool = False,
    chunk_bytes: int | None = None,
    gemm: GemmBackend = TORCH_GEMM,
    backend: KernelBackend = "auto",
) -> TokenLogprobs:
    """Return log p of K words for every token, if asked the entropy and log p of all other words.

    They are those of softmax(softcap(scale · (x · weightᵀ + bias)) / temperature), and have
    gradients. `IGNORE_INDEX` words are among the others.
    """
    rule = _Rule(softcap, scale, temperature)
    task = _Task(rule, entropy, rest, chunk_bytes, gemm, backend)
    return _words(x_ND, weight_VD, bias, words_NK, task)


class _Rule(NamedTuple):
    softcap: float | None
    scale: float | None
    temperature: float

    def shaped(self, logits: Tensor) -> Tensor:
        wide = logits.to(_wide(logits.dtype))
        wide = wide if self.scale is None else wide * self.scale
        wide = wide if self.softcap is None else self.softcap * torch.tanh(wide / self.softcap)
        return wide if self.temperature == 1 else wide / self.temperature

    def bend_(self, slope: Tensor, shaped: Tensor) -> Tensor:
        """Carry a gradient of shaped logits back to the logits."""
        if self.softcap is not None:
            slope.mul_(1 - (shaped * (self.temperature / self.softcap)).square())
        factor = (1.0 if self.scale is None else self.scale) / self.temperature
        return slope if factor == 1 else slope.mul_(factor)

    def of_rows(self) -> CrossEntropyOptions | None:
        """Return the same as the kernel knows it; None where it does not."""
        if self.temperature != 1 and self.softcap is not None:
            return None
        scale = self.scale
        if self.temperature != 1:
            scale = (1.0 if scale is None else scale) / self.temperature
        return CrossEntropyOptions(IGNORE_INDEX, self.softcap, scale, 0.0)


@dataclass(frozen=True, slots=True)
class _Task:
    rule: _Rule
    entropy: bool
    rest: bool
    chunk_bytes: int | None
    products: GemmBackend
    backend: KernelBackend

    def rows_rule(self, x_ND: Tensor, words_NK: Tensor) -> CrossEntropyOptions | None:
        one = words_NK.shape[1] == 1 and x_ND.dtype != torch.float64
        return self.rule.of_rows() if one else None

    def pieces(self, x_ND: Tensor, vocab: int, *, plain: bool) -> list[slice]:
        room = (
            get_default_chunk_bytes(x_ND.device) if self.chunk_bytes is None else self.chunk_bytes
        )
        each = _wide(x_ND.dtype).itemsize * _COPIES if plain else x_ND.element_size()
        tokens = x_ND.shape[0]
        count = -(-tokens // max(1, room // (vocab * each)))
        size = -(-tokens // max(1, count))
        return [slice(at, min(at + size, tokens)) for at in range(0, tokens, max(1, size))]

    def logits(self, x_ND: Tensor, weight_VD: Tensor, bias: Tensor | None) -> Tensor:
        logits = self.products.forward(x_ND, weight_VD)
        return logits if bias is None else logits.add_(bias)

    def turn(
        self, logits: Tensor, words_N: Tensor, rule: CrossEntropyOptions, *, gradient: bool
    ) -> Tensor:
        """Return the rows' -log p, and write its gradient over the logits where asked."""
        nats = logits.new_zeros(len(logits), dtype=torch.float32)
        kernel = (
            cross_entropy_rows_
            if should_use_triton(self.backend, logits)
            else cross_entropy_rows_reference_
        )
        kernel(logits, words_N, nats, torch.zeros_like(nats), rule, gradient)
        return nats


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _words(
    x_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, words_NK: Tensor, task: _Task
) -> TokenLogprobs:
    fits = x_ND.dim() == weight_VD.dim() == words_NK.dim() == 2
    if not (fits and x_ND.shape[1] == weight_VD.shape[1] and len(words_NK) == len(x_ND)):
        shapes = ", ".join(str(tuple(each.shape)) for each in (x_ND, weight_VD, words_NK))
        fix = "give x [tokens, hidden], weight [vocabulary, hidden], token ids [tokens, ids]"
        raise InputError(
            [Problem("compute_token_logprobs", f"the shapes {shapes} do not fit", fix)]
        )
    if not task.rule.temperature > 0:
        what = f"temperature is {task.rule.temperature:g}"
        fix = "give that of the sampler, above 0"
        raise InputError([Problem("compute_token_logprobs", what, fix)])
    out = _Words.apply(x_ND, weight_VD, bias, words_NK, task)  # type: ignore[no-untyped-call]
    return TokenLogprobs(out[0], out[1] if task.entropy else None, out[2] if task.rest else None)


class _Words(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        words_NK: Tensor,
        task: _Task,
    ) -> tuple[Tensor, Tensor, Tensor]:
        formats = (
            x_ND.dtype,
            get_grad_dtype(weight_VD),
            None if bias is None else get_grad_dtype(bias),
        )
        ctx.set_materialize_grads(False)
        x_ND, weight_VD = x_ND.contiguous(), weight_VD.to(x_ND.dtype).contiguous()
        bias = None if bias is None else bias.to(x_ND.dtype)
        logprobs = x_ND.new_zeros(words_NK.shape, dtype=_wide(x_ND.dtype))
        entropy = logprobs.new_zeros(len(words_NK) if task.entropy else 0)
        rest = logprobs.new_zeros(len(words_NK) if task.rest else 0)
        rule = None if task.entropy or task.rest else task.rows_rule(x_ND, words_NK)
        for part in task.pieces(x_ND, len(weight_VD), plain=rule is None):
            logits = task.logits(x_ND[part], weight_VD, bias)
            if rule is not None:
                nats = task.turn(logits, words_NK[part, 0].contiguous(), rule, gradient=False)
                logprobs[part, 0] = -nats
                continue
            shaped = task.rule.shaped(logits)
            lse = shaped.logsumexp(-1, keepdim=True)
            words = words_NK[part]
            chosen = shaped.gather(1, words.clamp(min=0)) - lse
            logprobs[part] = chosen.masked_fill(words == IGNORE_INDEX, 0)
            if task.rest:
                with mask_tokens(shaped, words.clamp(min=0), words != IGNORE_INDEX):
                    rest[part] = shaped.logsumexp(-1) - lse[:, 0]
            if task.entropy:
                shaped.sub_(lse)
                entropy[part] = -(shaped.exp() * shaped).sum(-1)
        ctx.save_for_backward(x_ND, weight_VD, bias, words_NK)
        ctx.task, ctx.formats = task, formats
        return logprobs, entropy, rest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None, of_rest: Tensor | None
    ) -> tuple[Any, ...]:
        if of_logprobs is None and of_entropy is None and of_rest is None:
            return None, None, None, None, None
        x_ND, weight_VD, bias, words_NK = ctx.saved_tensors
        task: _Task = ctx.task
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(words_NK, dtype=_wide(x_ND.dtype))
        of_logprobs = of_logprobs.masked_fill(words_NK == IGNORE_INDEX, 0)
        alone = of_entropy is None and of_rest is None
        rule = task.rows_rule(x_ND, words_NK) if alone else None
        dx = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        dw: Tensor | None = None
        db: Tensor | None = None
        for part in task.pieces(x_ND, len(weight_VD), plain=rule is None):
            logits = task.logits(x_ND[part], weight_VD, bias)
            if rule is not None:
                task.turn(logits, words_NK[part, 0].contiguous(), rule, gradient=True)
                slope = logits.mul_(-of_logprobs[part].to(logits.dtype))
            else:
                more = [None if one is None else one[part, None] for one in (of_entropy, of_rest)]
                slope = _slope(task.rule, logits, words_NK[part], of_logprobs[part], *more)
                slope = slope.to(x_ND.dtype)
            if dx is not None:
                dx[part] = task.products.dgrad(slope, weight_VD)
            if ctx.needs_input_grad[1]:
                dw = _add_product(dw, slope.t(), x_ND[part])
            if ctx.needs_input_grad[2]:
                rows = slope.sum(0, dtype=_wide(slope.dtype))
                db = rows if db is None else db + rows
        grads = [
            None if each is None else each.to(dtype)
            for each, dtype in zip((dx, dw, db), ctx.formats, strict=True)
        ]
        return (*grads, None, None)


def _slope(  # noqa: PLR0917
    rule: _Rule,
    logits: Tensor,
    words: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
    of_rest: Tensor | None,
) -> Tensor:
    """Return the gradient of a piece's logits.

    d log p_k / d z_j is [j = k] - p_j, and d H / d z_j is -p_j (log p_j + H). That of the rest's
    log r is q_j - p_j, where q is the distribution over other words than the given.
    """
    shaped = rule.shaped(logits)
    log_p = shaped - shaped.logsumexp(-1, keepdim=True)
    p = log_p.exp()
    of_all = of_logprobs.sum(-1, keepdim=True)
    slope = p * -(of_all if of_rest is None else of_all + of_rest)
    if of_entropy is not None:
        entropy = -(p * log_p).sum(-1, keepdim=True)
        slope -= of_entropy * p * (log_p + entropy)
    slope.scatter_add_(1, words.clamp(min=0), of_logprobs.to(slope.dtype))
    if of_rest is not None:
        with mask_tokens(shaped, words.clamp(min=0), words != IGNORE_INDEX):
            others = finite_logsumexp(shaped.logsumexp(-1, keepdim=True))
            slope.addcmul_(torch.sub(shaped, others, out=log_p).exp_(), of_rest)
    return rule.bend_(slope, shaped)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float64:
        return a @ b if total is None else total.addmm_(a, b)
    return addmm_fp32_(total, a, b)
