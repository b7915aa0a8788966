"""Paged caches with rows of given lengths, in blocks that lie in no order."""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.run.kernels.exactness import DEVICE, drawn


class Paged(NamedTuple):
    """Keys and values of rows, as they lie in pages."""

    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    lengths: Tensor


def paged(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    width: int = 16,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    heads_first: bool = False,
) -> Paged:
    """Draw keys and values; what no row holds is NaN, and so must not be used."""
    counts = [-(-length // block) for length in lengths]
    blocks = sum(counts) + 2
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    tables = torch.full((len(lengths), max(*counts, 1)), -1, dtype=torch.int32)
    shape = (blocks, kv_heads, block, width) if heads_first else (blocks, block, kv_heads, width)
    caches = []
    for seed in (1, 2):
        cache = (
            drawn(*shape, seed=seed).transpose(1, 2) if heads_first else drawn(*shape, seed=seed)
        )
        caches.append(cache)
    held = torch.zeros(blocks, block, dtype=torch.bool)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[first : first + count]
        tables[row, :count] = mine
        held[mine] = (torch.arange(count * block) < length).view(count, block)
        first += count
    for cache in caches:
        cache[~held.to(DEVICE)] = torch.nan
    k, v = (cache.to(dtype) for cache in caches)
    return Paged(k, v, tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
