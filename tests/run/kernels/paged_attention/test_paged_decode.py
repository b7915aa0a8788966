"""Decode attention over pages agrees with attention written out, however its work is shared."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.attention.attention_reference import attention_reference
from meshwright.run.kernels.paged_attention.paged_decode import (
    DECODE_TILES,
    DecodeTiles,
    paged_decode,
    plan_decode,
)
from tests.run.kernels.exactness import DEVICE, assert_near, drawn
from tests.run.kernels.paged import Paged, paged

LENGTHS = [70, 0, 1, 16, 170]


def checked(
    q: torch.Tensor, cache: Paged, cut: DecodeTiles | None = None, **options: Any
) -> torch.Tensor:
    """Compare the kernel with the reference in float64."""
    shape = {name: options[name] for name in ("window", "chunk", "queries") if name in options}
    invariant = options.pop("invariant", False)
    plan = plan_decode(
        cache.lengths, cache.k_cache, q.shape[1], cut=cut, invariant=invariant, **shape
    )
    got = paged_decode(q, *cache, plan=plan, backend="triton", **options)
    exact = paged_decode(q.double(), *cache, backend="torch", **options)
    eight_bits = cache.k_cache.element_size() == 1
    # Eight-bit values are multiplied by weights of 11 bits.
    assert_near(got, exact, torch.bfloat16 if eight_bits else None)
    return got


def test_reference_is_attention_of_the_last_token() -> None:
    cache = paged([37], heads_first=True)
    keys, values = (each[cache.tables[0].long()].flatten(0, 1)[None, :37] for each in cache[:2])
    q = drawn(1, 37, 4, 16)
    sinks, slopes = drawn(4, seed=3), drawn(4, seed=4).abs()
    options: dict[str, Any] = {"window": 9, "softcap": 2.0, "sinks": sinks, "alibi": slopes}
    whole = attention_reference(q, keys, values, **options)[:, -1]
    assert_near(paged_decode(q[:, -1], *cache, backend="torch", **options), whole.double())


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_of_all_lengths_are_exact(heads_first: bool, block: int, dtype: torch.dtype) -> None:
    cache = paged(LENGTHS, block=block, dtype=dtype, heads_first=heads_first)
    cut = DecodeTiles(tile_tokens=64, warps=4, stages=2, programs_per_sm=2)
    got = checked(drawn(len(LENGTHS), 8, 16), cache, cut)
    assert not got[1].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(3, 3, 16), (5, 1, 24), (66, 1, 16), (20, 1, 32)]
)
def test_groups_of_any_size_are_exact(heads: int, kv_heads: int, width: int) -> None:
    cache = paged([20, 40], kv_heads=kv_heads, width=width)
    checked(drawn(2, heads, width), cache)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"chunk": 32},
        {"softcap": 1.5, "scale": 0.7},
        {"sinks": drawn(4, seed=5)},
        {"alibi": drawn(4, seed=6).abs(), "window": 100},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("invariant", [False, True])
def test_options_are_exact(options: dict[str, Any], invariant: bool) -> None:
    cut = DecodeTiles(tile_tokens=32, warps=2, stages=2, programs_per_sm=2, min_tiles_per_split=1)
    checked(drawn(3, 4, 16), paged([150, 0, 47]), cut, invariant=invariant, **options)


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (4, {"window": 20, "alibi": drawn(4, seed=6).abs()}),
        (4, {"sinks": drawn(4, seed=5)}),
        (12, {"chunk": 32}),
    ],
    ids=["window", "sinks", "many"],
)
def test_a_few_queries_per_row_are_exact(heads: int, options: dict[str, Any]) -> None:
    cut = DecodeTiles(tile_tokens=32, warps=2, stages=2, programs_per_sm=2, min_tiles_per_split=1)
    # The second row is shorter than it has queries: those before its first key see nothing.
    checked(drawn(9, heads, 16), paged([90, 2, 40]), cut, queries=3, **options)


def test_scales_multiply_what_is_cached() -> None:
    cache = paged([50, 17], dtype=torch.float8_e4m3fn)
    k_scale, v_scale = torch.tensor([0.5, 3.0], device=DEVICE)
    checked(drawn(2, 4, 16, dtype=torch.bfloat16), cache, k_scale=k_scale, v_scale=v_scale)


def test_queries_beyond_float16_meet_keys_of_eight_bits() -> None:
    cache = paged([50, 17], dtype=torch.float8_e4m3fn)
    scale = torch.tensor(1e-5, device=DEVICE)
    checked(1e5 * drawn(2, 4, 16, dtype=torch.bfloat16), cache, k_scale=scale)


def test_a_row_is_the_same_to_the_bit_in_any_batch() -> None:
    cut = DecodeTiles(tile_tokens=32, warps=2, stages=2, programs_per_sm=2)
    cache = paged([300, 20, 77])
    q = drawn(3, 4, 16)
    plan = plan_decode(cache.lengths, cache.k_cache, 4, cut=cut, invariant=True)
    together = paged_decode(q, *cache, plan=plan, backend="triton")
    for row in range(3):
        one = slice(row, row + 1)
        lengths = cache.lengths[one]
        plan = plan_decode(lengths, cache.k_cache, 4, cut=cut, invariant=True)
        alone = paged_decode(
            q[one], cache.k_cache, cache.v_cache, cache.tables[one], lengths,
            plan=plan, backend="triton",
        )  # fmt: skip
        assert torch.equal(alone, together[one])


def test_shares_are_equal_whatever_the_lengths() -> None:
    cut = DecodeTiles(tile_tokens=32, warps=2, stages=2, programs_per_sm=2, min_tiles_per_split=1)
    lengths = torch.tensor([1000, 5, 64], dtype=torch.int32, device=DEVICE)
    cache = paged([1])
    plan = plan_decode(lengths, cache.k_cache, 4, cut=cut)
    # 32, 1 and 2 tiles, and one to begin with, for each of two heads: 76 in all.
    assert plan.work_partition[:4].tolist() == [0, 33, 35, 38]
    share = -(-76 // plan.programs)
    starts = [min(share * program, 76) for program in range(plan.programs + 1)]
    rows = [sum(2 * end <= start for end in (33, 35, 38)) for start in starts]
    assert plan.work_partition[4:].tolist() == rows


@pytest.mark.parametrize(("element", "width"), DECODE_TILES)
def test_all_programs_of_a_wave_fit_on_a_multiprocessor(element: int, width: int) -> None:
    cut = DECODE_TILES[element, width]
    # Of Hopper's 227 KiB some are left to queries, weights and sums.
    tiles = (cut.stages - 1) * 2 * cut.tile_tokens * width * element
    assert cut.programs_per_sm * (tiles + 8192) <= 227 * 1024
    assert cut.registers is None or cut.registers >= 128


def test_a_plan_for_another_window_is_refused() -> None:
    cache = paged([8])
    plan = plan_decode(cache.lengths, cache.k_cache, 4)
    with pytest.raises(InputError, match="plan: made for"):
        paged_decode(drawn(1, 4, 16), *cache, window=4, plan=plan, backend="triton")


def test_caches_that_lie_differently_are_refused() -> None:
    one, two = paged([8]), paged([8], heads_first=True)
    with pytest.raises(InputError, match="lay both out alike"):
        paged_decode(drawn(1, 4, 16), one.k_cache, two.v_cache, one.tables, one.lengths)
