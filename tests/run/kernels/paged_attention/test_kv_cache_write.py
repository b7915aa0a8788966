"""Keys and values reach their slots and no other place; the fused kernel does what its parts do."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.paged_attention.kv_cache_write import (
    KVCachePages,
    rope_and_write_kv,
    write_kv_cache,
    write_latent_cache,
)
from meshwright.run.kernels.rotary.qk_norm_rope import QKNorms
from meshwright.run.kernels.rotary.rotary import QKVSizes
from tests.run.kernels.exactness import DEVICE, assert_near, drawn

SLOTS = [9, -1, 0, 31, 12]
N = len(SLOTS)


def pages_of(
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    *,
    heads_first: bool = False,
    scaled: bool = False,
) -> KVCachePages:
    """Make empty caches of four blocks of eight tokens."""
    shape = (4, kv_heads, 8, width) if heads_first else (4, 8, kv_heads, width)
    caches = [torch.zeros(shape, device=DEVICE).to(dtype) for _ in range(2)]
    k, v = (cache.transpose(1, 2) if heads_first else cache for cache in caches)
    scales = torch.tensor([0.25, 2.0], device=DEVICE) if scaled else (None, None)
    return KVCachePages(k, v, torch.tensor(SLOTS, device=DEVICE), *scales)


def codes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


def representable(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw numbers that eight bits hold: Triton's interpreter rounds others wrongly."""
    return drawn(*shape, seed=seed).to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("heads_first", [False, True])
def test_tokens_go_to_their_slots(heads_first: bool) -> None:
    pages = pages_of(3, 24, torch.float32, heads_first=heads_first)
    k, v = drawn(N, 3, 24), drawn(N, 24, 3, seed=1).transpose(1, 2)
    write_kv_cache(k, v, pages, backend="triton")
    for x, cache in ((k, pages.k_cache), (v, pages.v_cache)):
        flat = cache.flatten(0, 1) if not heads_first else cache.reshape(32, 3, 24)
        for token, slot in enumerate(SLOTS):
            assert slot < 0 or torch.equal(flat[slot], x[token])
        rest = [slot for slot in range(32) if slot not in SLOTS]
        assert not flat[rest].any()


def test_eight_bits_hold_what_the_scale_leaves() -> None:
    ours, plain = (pages_of(2, 16, torch.float8_e4m3fn, scaled=True) for _ in range(2))
    k, v = representable(N, 2, 16), 2 * representable(N, 2, 16, seed=1)
    k[0, 0, 0] = 1e6
    write_kv_cache(k, v, ours, backend="triton")
    write_kv_cache(k, v, plain, backend="torch")
    for one, two in zip(ours[:2], plain[:2], strict=True):
        assert torch.equal(codes(one), codes(two))
    assert float(ours.k_cache[1, 1, 0, 0]) == 448.0
    assert torch.equal(ours.v_cache[0, 0].float() * 2, v[2])


def test_latents_go_to_their_slots() -> None:
    ours, plain = torch.zeros(2, 4, 8, 40, device=DEVICE)
    x, slots = drawn(N, 40), torch.tensor(SLOTS, device=DEVICE)
    write_latent_cache(x, ours, slots, backend="triton")
    write_latent_cache(x, plain, slots, backend="torch")
    assert torch.equal(ours, plain)
    assert torch.equal(ours[1, 1], x[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("half", "normed"), [(8, False), (8, True), (6, True), (6, False)])
def test_fused_kernel_does_what_its_parts_do(interleaved: bool, half: int, normed: bool) -> None:
    sizes = QKVSizes(4, 2, 16)
    ours, plain = (pages_of(2, 16, torch.float32) for _ in range(2))
    qkv, angles = drawn(N, sizes.width), drawn(N, half, seed=9)
    norms = QKNorms(drawn(16, seed=1), drawn(16, seed=2), 1e-6, unit_offset=half == 6)
    given = (sizes, (angles.cos(), angles.sin()))
    chosen = norms if normed else None
    got = rope_and_write_kv(
        qkv.clone(), *given, ours, chosen, interleaved=interleaved, backend="triton"
    )
    wanted = rope_and_write_kv(
        qkv.clone(), *given, plain, chosen, interleaved=interleaved, backend="torch"
    )
    assert_near(got, wanted.double())
    for one, two in zip(ours[:2], plain[:2], strict=True):
        assert_near(one, two.double())


def test_fused_kernel_writes_eight_bits() -> None:
    sizes = QKVSizes(4, 2, 16)
    ours, plain = (pages_of(2, 16, torch.float8_e4m3fn, scaled=True) for _ in range(2))
    qkv = representable(N, sizes.width)
    still = torch.ones(N, 6, device=DEVICE), torch.zeros(N, 6, device=DEVICE)
    rope_and_write_kv(qkv.clone(), sizes, still, ours, backend="triton")
    rope_and_write_kv(qkv.clone(), sizes, still, plain, backend="torch")
    for one, two in zip(ours[:2], plain[:2], strict=True):
        assert torch.equal(codes(one), codes(two))
    keys = sizes.split(qkv)[1]
    assert torch.equal(ours.k_cache[0, 0].float() / 4, keys[2])


def test_slots_for_other_tokens_are_refused() -> None:
    pages = pages_of(2, 16, torch.float32)
    with pytest.raises(InputError, match=r"slots: shape \(5,\) for 2 tokens"):
        write_kv_cache(drawn(2, 2, 16), drawn(2, 2, 16), pages)
