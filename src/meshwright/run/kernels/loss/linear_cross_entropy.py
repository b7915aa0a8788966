"""The head's product and the cross-entropy of its logits, without ever holding all logits.

Tokens go through in chunks. For each, a matrix product fills one reused buffer with logits, a
kernel turns every row of it into that row's gradient in place, and two more products carry the
gradient to the chunk's inputs and to the weight. All of it happens in the forward pass, where the
logits are; `backward` only scales what is there.

Bytes moved by the kernel, the floor: each logit read once from memory and its gradient written
once. A row of 128k logits (256 KB) is read a second time from the second-level cache.

Shape letters: N tokens, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.gemm.gemm import TORCH_GEMM, GemmBackend
from meshwright.run.kernels.loss.cross_entropy_kernel import (
    CrossEntropyOptions,
    cross_entropy_rows_,
    cross_entropy_rows_reference_,
)
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.loss.scale_tensor import scale_tensor
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton

MAX_CHUNK_BYTES = 8 << 30
"""Most the buffer of logits takes by default: 32k tokens at 128k words in bfloat16."""
_CHUNK_SHARE = 16
"""A device's memory over that of the buffer, where the device is smaller."""
_ALIGN = 64
"""Elements by which rows of a loose buffer are aligned: a cache line of bfloat16."""


@dataclass(frozen=True, slots=True)
class CrossEntropySums:
    """Sums over the tokens that count; divide by `count` for means."""

    loss_sum: torch.Tensor
    """float32 scalar: cross-entropy. Its gradient includes that of `z`, which has none itself."""
    count: torch.Tensor
    """int64 scalar: how many labels are not ignored."""
    z_loss_sum: torch.Tensor
    """float32 scalar: `z_loss` times the sum of squares of log Σ exp(logits)."""


def linear_cross_entropy(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore: int = IGNORE_INDEX,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0.0,
    chunk_bytes: int | None = None,
    gemm: GemmBackend = TORCH_GEMM,
    backend: KernelBackend = "auto",
) -> CrossEntropySums:
    """Return the summed cross-entropy of `softcap(scale · (x · weightᵀ + bias))`.

    `z_loss` adds that multiple of log²Σexp to what is differentiated (PaLM, arXiv 2204.02311 §5).
    `chunk_bytes` bounds the buffer of logits (None: by the device's memory); it is exceeded, up to
    twice, where smaller chunks would take as much memory for their float32 sum of the weight's
    gradient.
    A label outside the vocabulary that is not `ignore` makes the sum NaN on a GPU, an error else.
    """
    grad = torch.is_grad_enabled()
    given = (x_ND, weight_VD, bias)
    work = _Work(
        *given,
        labels_N,
        rule=CrossEntropyOptions(ignore, softcap, scale, z_loss),
        needs=tuple(grad and each is not None and each.requires_grad for each in given),
        chunk_bytes=chunk_bytes,
        gemm=gemm,
        backend=backend,
    )
    nats, z = _LinearCrossEntropy.apply(*given, work)  # type: ignore[no-untyped-call]
    return CrossEntropySums(nats, (labels_N != ignore).sum(), z)


def linear_cross_entropy_reference(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore: int = IGNORE_INDEX,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0.0,
) -> CrossEntropySums:
    """Do the same with all logits at once and autograd, in the precision of what is given."""
    logits = torch.nn.functional.linear(x_ND, weight_VD, bias)
    logits = logits if scale is None else logits * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    nats = torch.nn.functional.cross_entropy(logits, labels_N, ignore_index=ignore, reduction="sum")
    valid = labels_N != ignore
    z = z_loss * torch.logsumexp(logits, dim=-1)[valid].square().sum()
    return CrossEntropySums(nats + (z - z.detach()), valid.sum(), z.detach())


def get_default_chunk_bytes(device: torch.device) -> int:
    """Return how large the buffer of logits may be: the larger, the fewer sums of chunks."""
    if device.type != "cuda":
        return MAX_CHUNK_BYTES
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return min(MAX_CHUNK_BYTES, int(memory_bytes) // _CHUNK_SHARE)


def _check(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias: torch.Tensor | None,
    labels_N: torch.Tensor,
    softcap: float | None,
) -> None:
    where, problems = "linear_cross_entropy", []
    fits = x_ND.dim() == weight_VD.dim() == 2 and x_ND.shape[1] == weight_VD.shape[1]
    if not fits or labels_N.shape != x_ND.shape[:1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (x_ND, weight_VD, labels_N))
        fix = "give x [tokens, hidden], weight [vocabulary, hidden] and labels [tokens]"
        problems.append(Problem(where, f"the shapes {shapes} do not fit", fix))
    if bias is not None and bias.shape != weight_VD.shape[:1]:
        what = f"bias has shape {tuple(bias.shape)}, the weight {tuple(weight_VD.shape)}"
        problems.append(Problem(where, what, "give one bias per word"))
    if softcap is not None and not softcap > 0:
        problems.append(Problem(where, f"softcap is {softcap}", "give a number above 0, or None"))
    if problems:
        raise InputError(problems)


def is_weight_grad_rounded(weight_VD: torch.Tensor, x_ND: torch.Tensor) -> bool:
    """Say whether a weight's gradient that one product makes is rounded by it, not kept in float32.

    Half precision would overflow: it is a sum over tokens that `backward` scales down.
    """
    return get_grad_dtype(weight_VD) == x_ND.dtype != torch.float16


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias: torch.Tensor | None,
        work: "_Work",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        work.run()
        ctx.save_for_backward(work.dx_ND, work.dw_VD, work.db_V)
        of_bias = None if bias is None else get_grad_dtype(bias)
        ctx.dtypes = (x_ND.dtype, get_grad_dtype(weight_VD), of_bias)
        ctx.backend = work.backend
        nats, z_loss = work.nats_N.sum(), work.rule.z_loss
        z = z_loss * work.lse_N.square().sum() if z_loss else torch.zeros_like(nats)
        ctx.mark_non_differentiable(z)
        return nats, z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        # One pass scales, and rounds a float32 sum to the parameter's format.
        grads = [
            None if saved is None else scale_tensor(saved, grad, dtype, backend=ctx.backend)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None)


class _Work:
    """One pass over the chunks: what goes in, and the results as they fill up."""

    def __init__(
        self,
        x_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias: torch.Tensor | None,
        labels_N: torch.Tensor,
        *,
        rule: CrossEntropyOptions,
        needs: tuple[bool, ...],
        chunk_bytes: int | None,
        gemm: GemmBackend,
        backend: KernelBackend,
    ) -> None:
        _check(x_ND, weight_VD, bias, labels_N, rule.softcap)
        self.x_ND = x_ND.detach().contiguous()
        self.weight_VD = weight_VD.detach().to(x_ND.dtype).contiguous()
        self.bias = None if bias is None else bias.detach().to(x_ND.dtype)
        self.labels_N, self.rule, self.needs = labels_N.contiguous(), rule, needs
        self.chunk_bytes = (
            get_default_chunk_bytes(x_ND.device) if chunk_bytes is None else chunk_bytes
        )
        self.products, self.backend = gemm, backend
        self.rounds_weight = is_weight_grad_rounded(weight_VD, x_ND)
        self.nats_N = x_ND.new_zeros(x_ND.shape[0], dtype=torch.float32)
        self.lse_N = torch.zeros_like(self.nats_N)
        self.dx_ND: torch.Tensor | None = None
        self.dw_VD: torch.Tensor | None = None
        self.db_V: torch.Tensor | None = None

    def run(self) -> None:
        """Go through all tokens."""
        tokens, vocab = self.x_ND.shape[0], self.weight_VD.shape[0]
        per_chunk = self._chunk_tokens()
        # Rows of an odd vocabulary are kept apart by whole cache lines, for cuBLAS and for Triton.
        loose = vocab % _ALIGN != 0 or self.bias is not None
        room = self.x_ND.new_empty(per_chunk, -(-vocab // _ALIGN) * _ALIGN) if loose else None
        for start in range(0, max(1, tokens), per_chunk):
            rows = slice(start, min(start + per_chunk, tokens))
            x_ND = self.x_ND[rows]
            if room is None:
                logits = self.products.forward(x_ND, self.weight_VD)
            else:
                logits = self._into(room[: len(x_ND), :vocab], x_ND)
            turn = (
                cross_entropy_rows_
                if should_use_triton(self.backend, logits)
                else cross_entropy_rows_reference_
            )
            results = (self.labels_N[rows], self.nats_N[rows], self.lse_N[rows])
            turn(logits, *results, self.rule, any(self.needs))
            self._carry(logits, rows, only=per_chunk >= tokens)
            del logits  # before the next product takes memory for its own

    def _chunk_tokens(self) -> int:
        """Return the size of equal chunks.

        More than one needs the weight's gradient in float32: 4·D bytes per word, where a token
        costs its element size per word.
        """
        tokens, hidden = self.x_ND.shape
        element_bytes = self.x_ND.element_size()
        most = max(1, self.chunk_bytes // (self.weight_VD.shape[0] * element_bytes))
        chunks = max(1, -(-tokens // most))
        per_chunk = -(-tokens // chunks)
        aligned = -(-per_chunk // 16) * 16
        per_chunk = aligned if aligned <= most else per_chunk
        spared_bytes = (tokens - per_chunk) * element_bytes
        if self.needs[1] and chunks == 2 and spared_bytes <= 4 * hidden:
            return tokens
        return max(1, min(per_chunk, tokens))

    def _into(self, logits: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return torch.mm(x_ND, self.weight_VD.t(), out=logits)
        return torch.addmm(self.bias, x_ND, self.weight_VD.t(), out=logits)

    def _carry(self, gradient: torch.Tensor, rows: slice, *, only: bool) -> None:
        """Carry the gradient of a chunk's logits to its inputs, the weight and the bias."""
        x_ND = self.x_ND[rows]
        if self.needs[0]:
            part = self.products.dgrad(gradient, self.weight_VD)
            if only:
                self.dx_ND = part
            else:
                self.dx_ND = torch.empty_like(self.x_ND) if self.dx_ND is None else self.dx_ND
                self.dx_ND[rows] = part
        if self.needs[1]:
            if only and self.rounds_weight:
                self.dw_VD = self.products.wgrad(gradient, x_ND)
            else:
                self.dw_VD = addmm_fp32_(self.dw_VD, gradient.t(), x_ND)
        if self.needs[2]:
            part = gradient.sum(0, dtype=torch.float32)
            self.db_V = part if self.db_V is None else self.db_V + part


def addmm_fp32_(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a·b to a float32 total, in the product itself where the device can."""
    wide = torch.float32
    if a.is_cuda and a.dtype != wide:
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.addmm(total, a, b, out_dtype=wide, out=total)
    if total is None:
        return a.to(wide) @ b.to(wide)
    return total.addmm_(a.to(wide), b.to(wide))
