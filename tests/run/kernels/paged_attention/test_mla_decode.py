"""Latent attention over pages agrees with attention over keys and values made of the latents."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.attention.attention_reference import attention_reference
from meshwright.run.kernels.paged_attention.mla_decode import paged_mla_decode, plan_mla_decode
from meshwright.run.kernels.paged_attention.paged_decode import DecodeTiles
from tests.run.kernels.exactness import assert_near, drawn
from tests.run.kernels.paged import paged

RANK, ROPE = 24, 8
CUT = DecodeTiles(tile_tokens=16, warps=4, stages=2, programs_per_sm=2)


def test_reference_is_attention_of_what_latents_unfold_to() -> None:
    heads, value = 3, 5
    cache = paged([30], kv_heads=1, width=RANK + ROPE)
    tokens = cache.k_cache[cache.tables[0].long()].flatten(0, 2)[:30]
    keys_up, values_up = drawn(heads, 6, RANK, seed=1), drawn(heads, value, RANK, seed=2)
    q, q_rope = drawn(1, heads, 6), drawn(1, heads, ROPE, seed=3)
    keys = torch.einsum("sl,hkl->shk", tokens[:, :RANK], keys_up)
    ropes = tokens[:, None, RANK:].expand(-1, heads, -1)
    values = torch.einsum("sl,hvl->shv", tokens[:, :RANK], values_up)
    whole = attention_reference(
        torch.cat((q, q_rope), -1)[None], torch.cat((keys, ropes), -1)[None], values[None],
        causal=False, scale=0.3,
    )  # fmt: skip
    absorbed = torch.cat((torch.einsum("rhk,hkl->rhl", q, keys_up), q_rope), -1)
    got = paged_mla_decode(
        absorbed, cache.k_cache[:, :, 0], cache.tables, cache.lengths, rank=RANK, scale=0.3
    )
    assert_near(torch.einsum("rhl,hvl->rhv", got, values_up), whole[0].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "block"), [(5, 16), (20, 8)])
def test_rows_of_all_lengths_are_exact(dtype: torch.dtype, heads: int, block: int) -> None:
    made = paged([50, 0, 7], kv_heads=1, width=RANK + ROPE, block=block, dtype=dtype)
    cache = made.k_cache[:, :, 0]
    q = drawn(3, heads, RANK + ROPE)
    plan = plan_mla_decode(made.lengths, cache, heads, cut=CUT)
    rows = (made.tables, made.lengths)
    got = paged_mla_decode(q, cache, *rows, rank=RANK, scale=0.2, plan=plan, backend="triton")
    exact = paged_mla_decode(q.double(), cache, *rows, rank=RANK, scale=0.2, backend="torch")
    assert_near(got, exact, torch.bfloat16 if dtype.itemsize == 1 else None)
    assert not got[1].any()


def test_a_rank_beyond_the_cache_is_refused() -> None:
    made = paged([5], kv_heads=1)
    with pytest.raises(InputError, match="rank: 16 of 16"):
        paged_mla_decode(
            drawn(1, 2, 16), made.k_cache[:, :, 0], made.tables, made.lengths, rank=16, scale=1.0
        )
