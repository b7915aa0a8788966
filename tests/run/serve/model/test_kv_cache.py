"""Blocks keep what was written into them, wherever they are moved."""

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.serve.model.kv_cache import PagedKVCache
from tests.run.serve.model.small import hybrid, latent, small


def filled(cache: PagedKVCache, seed: int = 0) -> torch.Tensor:
    """Fill a cache with bytes and return them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (cache.num_blocks, cache.block_bytes)
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(cache.device)
    cache.scatter(range(cache.num_blocks), rows)
    return rows


def test_a_block_has_the_bytes_of_all_layers() -> None:
    decoder = small()
    # 2 layers, keys and values, 16 tokens, 2 heads of 8 numbers of 4 bytes.
    assert PagedKVCache(decoder, 1, 16).block_bytes == 2 * 2 * 16 * 2 * 8 * 4
    assert PagedKVCache(decoder, 1, 16, fp8=True).block_bytes == 2 * 2 * 16 * 2 * 8
    # Latent and rotary key of each token.
    assert PagedKVCache(latent(), 1, 16).block_bytes == 2 * 16 * (12 + 4) * 4
    # One of three layers keeps keys.
    assert PagedKVCache(hybrid(), 1, 16).block_bytes == 2 * 16 * 2 * 8 * 4


@pytest.mark.parametrize("fp8", [False, True])
def test_layers_show_blocks_tokens_heads_and_width(fp8: bool) -> None:
    cache = PagedKVCache(small(), 3, 4, fp8=fp8)
    layer = cache.layers[1]
    assert layer is not None
    assert layer.value_cache is not None
    assert layer.key_cache.shape == layer.value_cache.shape == (3, 4, 2, 8)
    assert layer.key_cache.stride(-1) == 1
    assert (layer.key_scale is not None) == fp8
    kept = PagedKVCache(latent(), 3, 4).layers[0]
    assert kept is not None
    assert kept.key_cache.shape == (3, 4, 16)
    assert kept.value_cache is None


def test_blocks_are_copied() -> None:
    cache = PagedKVCache(small(), 4, 4)
    rows = filled(cache)
    cache.copy_blocks([0, 1], [1, 3])
    assert torch.equal(cache.gather(range(4)), rows[[0, 0, 2, 1]])


@pytest.mark.parametrize("fp8", [False, True])
def test_blocks_go_to_host_memory_and_back(fp8: bool) -> None:
    cache = PagedKVCache(latent(), 4, 4, fp8=fp8, num_host_blocks=3)
    rows = filled(cache)
    cache.swap_out([3, 1], [0, 2])
    filled(cache, seed=1)
    cache.swap_in([2, 0], [0, 2])
    assert torch.equal(cache.gather([0, 2]), rows[[1, 3]])


def test_blocks_travel_to_another_cache() -> None:
    one, other = (PagedKVCache(small(), 4, 4) for _ in range(2))
    rows = filled(one)
    other.import_blocks([3, 0], one.export_blocks([1, 2]))
    assert torch.equal(other.gather([3, 0]), rows[[1, 2]])
    with pytest.raises(InputError, match="same model, block size"):
        other.import_blocks([0], b"short")


def test_a_sleeping_cache_holds_no_memory_and_wakes_empty() -> None:
    cache = PagedKVCache(small(), 4, 4)
    filled(cache)
    cache.sleep()
    assert cache.is_sleeping
    with pytest.raises(InputError, match="wake it first"):
        cache.gather([0])
    cache.wake_up()
    assert not cache.gather(range(4)).any()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="use 16, 32"):
        PagedKVCache(small(), 4, 12)
    with pytest.raises(InputError, match="0 blocks hold no sequence"):
        PagedKVCache(small(), 0, 16)
    with pytest.raises(InputError, match="host_blocks > 0"):
        PagedKVCache(small(), 4, 4).swap_out([0], [0])
