"""The length (L2 norm) of all gradients together, and whether any of them is not a number.

One launch reads every gradient once and leaves two partial results per chunk, a second launch of
a single program adds those up in a fixed order: the same gradients always give the same bits.
Bytes moved, the floor: each gradient's own, read once; partial results are 1/4096 of them.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from collections.abc import Iterable
from typing import NamedTuple

import torch

from meshwright.run.kernels.optimizer.multi_tensor import (
    MIXED_DTYPES,
    TensorList,
    find_chunk,
    load_tensor_pointer,
    load_tile,
)
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

TILE = 4096
"""Elements of one load: two accesses of 16 bytes for each of 256 threads, in bfloat16."""
WARPS = 8
PARTIALS_TILE = 4096
_MIXED = tl.constexpr(MIXED_DTYPES)
MAX_FLOAT32 = tl.constexpr(3.4028234663852886e38)
"""The largest finite float32: infinities are above, and NaN compares as false."""


class GradNorm(NamedTuple):
    """What a step has to know about its gradients before it uses them."""

    norm: torch.Tensor
    """float32 scalar: the root of the sum of all squares; infinite or NaN where an element is."""
    nonfinite_count: torch.Tensor
    """int64 scalar: how many elements are infinite or NaN."""


def compute_grad_norm(
    grads: TensorList | Iterable[torch.Tensor], *, backend: KernelBackend = "auto"
) -> GradNorm:
    """Measure all gradients together; nothing is waited for, both results stay on the device.

    Give a `TensorList` where the same tensors are measured in every step: its tables are made once.
    """
    listed = grads if isinstance(grads, TensorList) else tuple(grads)
    if not listed:
        return GradNorm(torch.zeros(()), torch.zeros((), dtype=torch.int64))
    first = listed.tensors[0] if isinstance(listed, TensorList) else listed[0]
    if not should_use_triton(backend, first):
        return grad_norm_reference(listed.tensors if isinstance(listed, TensorList) else listed)
    return _launch(listed if isinstance(listed, TensorList) else TensorList.from_tensors(listed))


def grad_norm_reference(grads: Iterable[torch.Tensor]) -> GradNorm:
    """Do the same with torch operations, a few for each tensor."""
    held = tuple(grads)
    squares = [each.detach().float().square().sum().double() for each in held]
    counts = [each.numel() - torch.isfinite(each).sum() for each in held]
    return GradNorm(torch.stack(squares).sum().sqrt().float(), torch.stack(counts).sum())


def _launch(grads: TensorList) -> GradNorm:
    chunks, device = grads.chunks, grads.addresses.device
    squares = torch.empty(chunks.num_chunks, dtype=torch.float32, device=device)
    counts = torch.empty(chunks.num_chunks, dtype=torch.int32, device=device)
    norm = torch.empty((), dtype=torch.float32, device=device)
    nonfinite = torch.empty((), dtype=torch.int64, device=device)
    if chunks.num_chunks:
        _square_chunks[(chunks.num_chunks,)](
            grads.addresses,
            grads.dtype_codes,
            *chunks.tables,
            squares,
            counts,
            KIND=grads.common_dtype_code,
            ALIGNED=grads.is_aligned,
            CHUNK=chunks.chunk_elements,
            TILE=min(TILE, chunks.chunk_elements),
            num_warps=WARPS,
        )
    _add_up[(1,)](
        squares, counts, norm, nonfinite, chunks.num_chunks, TILE=PARTIALS_TILE, num_warps=32
    )
    return GradNorm(norm, nonfinite)


@triton.jit
def _square_chunks(
    addresses,
    kinds,
    chunk_tensors,
    chunk_starts,
    chunk_lengths,
    squares,
    counts,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Leave the sum of squares and the number of non-finite elements of one chunk."""
    index = tl.program_id(0)
    tensor, start, length = find_chunk(chunk_tensors, chunk_starts, chunk_lengths, index)
    if KIND == _MIXED:
        kind = tl.load(kinds + tensor)
    else:
        kind = KIND
    # Each branch ends in two numbers, so that no tile has to change hands between layouts.
    if kind == 0:
        square, count = _square(addresses, tensor, start, length, tl.float32, ALIGNED, CHUNK, TILE)
    elif kind == 1:
        square, count = _square(addresses, tensor, start, length, tl.bfloat16, ALIGNED, CHUNK, TILE)
    else:
        square, count = _square(addresses, tensor, start, length, tl.float16, ALIGNED, CHUNK, TILE)
    tl.store(squares + index, square)
    tl.store(counts + index, count)


@triton.jit
def _square(
    addresses,
    tensor,
    start,
    length,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    pointer = load_tensor_pointer(addresses, tensor, TYPE, ALIGNED) + start
    squares = tl.zeros((TILE,), tl.float32)
    if length >= CHUNK:
        # No branch within the unrolled loop: all loads can be under way together.
        for first in tl.static_range(0, CHUNK, TILE):
            value = tl.load(pointer + first + tl.arange(0, TILE)).to(tl.float32)
            squares += value * value
    else:
        for first in range(0, length, TILE):
            value = load_tile(pointer + first, length - first, TILE).to(tl.float32)
            squares += value * value
    square = tl.sum(squares)
    count = 0
    if not (square <= MAX_FLOAT32):
        # Rare, and worth a second look: a sum of large numbers overflows as well.
        for first in range(0, length, TILE):
            value = load_tile(pointer + first, length - first, TILE).to(tl.float32)
            count += tl.sum(tl.where(tl.abs(value) <= MAX_FLOAT32, 0, 1))
    return square, count


@triton.jit
def _add_up(squares, counts, norm, nonfinite, length, TILE: tl.constexpr):
    """Add up the chunks' results in float64: there may be half a million."""
    lane = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float64)
    count = tl.zeros((TILE,), tl.int64)
    for first in range(0, length, TILE):
        inside = first + lane < length
        total += tl.load(squares + first + lane, mask=inside, other=0.0).to(tl.float64)
        count += tl.load(counts + first + lane, mask=inside, other=0).to(tl.int64)
    tl.store(norm, tl.sqrt(tl.sum(total)).to(tl.float32))
    tl.store(nonfinite, tl.sum(count))
