"""Prefill attention over pages agrees with attention written out, in chunks and mixed batches."""

from itertools import accumulate
from typing import Any

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.run.kernels.attention.attention_reference import attention_reference
from meshwright.run.kernels.paged_attention.paged_prefill import (
    MixedBatchCounts,
    PrefillTiles,
    has_no_cached_prefix,
    paged_attention,
    paged_prefill,
)
from tests.run.kernels.exactness import DEVICE, assert_near, drawn
from tests.run.kernels.paged import paged

QUERIES, LENGTHS = [1, 9, 0, 3], [20, 9, 0, 35]
SMALL = PrefillTiles(16, 16, warps=4, stages=2)


def starts_of(queries: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=DEVICE)


def test_reference_is_attention_cut_short() -> None:
    cache = paged([37])
    keys, values = (each[cache.tables[0].long()].flatten(0, 1)[None, :37] for each in cache[:2])
    q = drawn(1, 37, 4, 16)
    options: dict[str, Any] = {"chunk": 8, "softcap": 2.0, "sinks": drawn(4, seed=3)}
    whole = attention_reference(q, keys, values, **options)[0, -5:]
    got = paged_prefill(q[0, -5:], *cache, starts_of([5]), backend="torch", **options)
    assert_near(got, whole.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("block", "heads", "kv_heads"), [(16, 4, 2), (8, 3, 1), (64, 17, 1)])
def test_rows_of_all_kinds_are_exact(
    dtype: torch.dtype, block: int, heads: int, kv_heads: int
) -> None:
    cache = paged(LENGTHS, block=block, kv_heads=kv_heads, dtype=dtype, heads_first=block == 8)
    # Three tokens more than the rows have: padding.
    q = drawn(sum(QUERIES) + 3, heads, 16)
    starts = starts_of(QUERIES)
    got = paged_prefill(q, *cache, starts, tiles=SMALL, backend="triton")
    exact = paged_prefill(q.double(), *cache, starts, backend="torch")
    assert_near(got, exact, torch.bfloat16 if dtype.itemsize == 1 else None)
    assert not got[-3:].any()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 9},
        {"chunk": 16},
        {"softcap": 1.5, "scale": 0.7},
        {"sinks": drawn(4, seed=5)},
        {"alibi": drawn(4, seed=6).abs()},
        {"k_scale": drawn(1, seed=7), "v_scale": drawn(1, seed=8)},
    ],
    ids="-".join,
)
def test_options_are_exact(options: dict[str, Any]) -> None:
    cache, starts = paged([30, 6]), starts_of([10, 6])
    q = drawn(16, 4, 16)
    got = paged_prefill(q, *cache, starts, tiles=SMALL, backend="triton", **options)
    assert_near(got, paged_prefill(q.double(), *cache, starts, backend="torch", **options))


def test_a_row_of_padding_reads_nothing() -> None:
    cache = paged([5, 0])
    got = paged_prefill(drawn(3, 4, 16), *cache, starts_of([2, 1]), backend="torch")
    assert got[:2].any()
    assert not got[2].any()


def test_decodes_and_prefills_mix() -> None:
    cache = paged([30, 5, 0, 21, 26])
    starts = starts_of([1, 1, 1, 9, 2])
    q = drawn(16, 4, 16)
    got = paged_attention(q, *cache, starts, 3, backend="triton", window=25)
    exact = paged_attention(q.double(), *cache, starts, 3, backend="torch", window=25)
    assert_near(got, exact)
    assert not got[2].any()
    assert not got[14:].any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("lengths", "queries", "live"),
    [
        ([30, 5, 21, 26], [1, 1, 9, 2], 2),
        ([17, 8], [7, 8], 0),
        ([9, 20, 33], [1, 1, 1], 3),
        ([12, *range(3, 27)], [1, *[3, 1, 2] * 8], 1),
    ],
    ids=["both", "prompts", "decodes", "many"],
)
def test_a_tensor_says_how_many_rows_decode(
    lengths: list[int], queries: list[int], live: int, backend: str
) -> None:
    room, parts = 5, len(lengths) - live
    empty = 3
    # Rows that are not there begin where the last one ends; four tokens belong to no row.
    cache, starts = paged([*lengths, *[0] * empty]), starts_of([*queries, *[0] * empty])
    q = drawn(sum(queries) + 4, 4, 16)
    split = MixedBatchCounts(torch.tensor([live, parts], dtype=torch.int32, device=DEVICE), room)
    options: dict[str, Any] = {"window": 25, "softcap": 2.0}
    got = paged_attention(q, *cache, starts, split, backend=backend, **options)
    exact = paged_prefill(q.double(), *cache, starts, backend="torch", **options)
    assert_near(got, exact)
    assert not got[-4:].any()


def test_rows_of_a_few_queries_go_the_way_of_decodes() -> None:
    cache = paged([30, 5, 21])
    starts = starts_of([2, 2, 6])
    q = drawn(10, 4, 16)
    got = paged_attention(q, *cache, starts, 2, queries=2, backend="triton")
    exact = paged_prefill(q.double(), *cache, starts, backend="torch")
    assert_near(got, exact)


def test_fresh_rows_have_no_other_keys() -> None:
    assert has_no_cached_prefix([3, 0, 5], [3, 0, 5])
    assert not has_no_cached_prefix([3, 1], [3, 5])
