"""`apply_token_bitmask`: sets the logits of disallowed tokens to -inf, in place."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from typing import TYPE_CHECKING

import torch

from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

if TYPE_CHECKING:
    pass


_BLOCK = 4096


def apply_token_bitmask(
    logits_LV: torch.Tensor, mask_LW: torch.Tensor, *, backend: KernelBackend = "auto"
) -> None:
    """Set logits to -inf, in place, whose bit in the mask is 0."""
    lines, vocab = logits_LV.shape
    if should_use_triton(backend, logits_LV):
        grid = (lines, -(-vocab // _BLOCK))
        _forbid[grid](
            logits_LV, logits_LV.stride(0), mask_LW, mask_LW.stride(0), vocab, BLOCK=_BLOCK
        )
        return
    bits_32 = torch.arange(32, dtype=torch.int32, device=mask_LW.device)
    allowed_LWB = (mask_LW[:, :, None] >> bits_32) & 1
    logits_LV.masked_fill_(allowed_LWB.flatten(1)[:, :vocab] == 0, -torch.inf)


@triton.jit
def _forbid(logits, stride, masks, words, vocab, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    word = tl.load(masks + line * words + index // 32, mask=inside, other=0)
    forbidden = ((word >> (index % 32)) & 1) == 0
    tl.store(logits + line * stride + index, float("-inf"), mask=inside & forbidden)
