"""Steps over a paged cache give the logits of the whole sequence computed at once."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.served_model import ServedModel
from tests.run.serve.model.small import DEVICE, chunked, hybrid, latent, made, small

Make = Callable[[], Decoder]
TOKENS = torch.randint(0, 61, (1, 21), generator=torch.Generator().manual_seed(3)).to(DEVICE)


def whole(decoder: Decoder) -> Tensor:
    """Return the logits of all tokens, before anything takes hold of the decoder."""
    with torch.no_grad():
        logits: Tensor = decoder(TOKENS)[0]
    return logits


@pytest.mark.parametrize("make", [small, chunked, latent, hybrid])
@pytest.mark.parametrize("pieces", [(21,), (7, 1, 1, 12), (1,) * 21])
def test_pieces_of_a_sequence_give_its_logits(make: Make, pieces: tuple[int, ...]) -> None:
    decoder = make()
    wanted = whole(decoder)
    forward = ServedModel(decoder, PagedKVCache(decoder, 8, 4), state_rows=2)
    found, begin = [], 0
    for count in pieces:
        tokens = TOKENS[0, begin : begin + count].tolist()
        step = build_forward_batch(
            [BatchRow(tokens, begin, [7, 2, 5, 0, 3, 6], 1)], 4, DEVICE, all_wanted=True
        )
        found.append(forward.forward(step))
        begin += count
    torch.testing.assert_close(torch.cat(found), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [small, chunked, latent])
@pytest.mark.parametrize("begin", [0, 5])
def test_the_ways_of_a_gpu_give_the_same(make: Make, begin: int) -> None:
    decoder = make()
    wanted = whole(decoder)
    forward = ServedModel(decoder, PagedKVCache(decoder, 16, 4))
    forward.forward_context.on_gpu = True
    tables = [range(6), range(6, 12)]
    if begin:
        forward.forward(
            build_forward_batch(
                [BatchRow(TOKENS[0, :begin].tolist(), 0, table) for table in tables], 4, DEVICE
            )
        )
    rows = [
        BatchRow(TOKENS[0, begin:end].tolist(), begin, table)
        for end, table in zip((21, 13), tables, strict=True)
    ]
    step = build_forward_batch(rows, 4, DEVICE, all_wanted=True)
    found = forward.forward(step)
    assert step.has_no_cached_prefix == (begin == 0)
    both = torch.cat((wanted[begin:], wanted[begin:13]))
    torch.testing.assert_close(found, both, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [small, chunked, latent])
def test_keys_in_fp8_stay_near(make: Make) -> None:
    decoder = make()
    wanted = whole(decoder)
    forward = ServedModel(decoder, PagedKVCache(decoder, 8, 4, fp8=True))
    tokens = TOKENS[0].tolist()
    parts = [BatchRow(tokens[:5], 0, range(6)), BatchRow(tokens[5:], 5, range(6))]
    # The first one may read what it has at hand; the second reads what was kept.
    found = [
        forward.forward(build_forward_batch([row], 4, DEVICE, all_wanted=True)) for row in parts
    ]
    error = (found[1] - wanted[5:]).norm() / wanted[5:].norm()
    # Three bits after the point, in keys and in values, twice.
    assert 0 < error < 0.2


def test_scales_of_fp8_are_used() -> None:
    decoder = small()
    wanted = whole(decoder)
    cache = PagedKVCache(decoder, 8, 4, fp8=True)
    # Far below what fp8 can tell apart from nought, unless keys are divided first.
    cache.scales.fill_(1e-4)
    with torch.no_grad():
        for mixer in (part for part in decoder.modules() if isinstance(part, SelfAttention)):
            mixer.qkv.weight[32:].mul_(1e-4)
            mixer.o.weight.mul_(1e4)
            mixer.qkv.weight[:32].mul_(1e4)
    forward = ServedModel(decoder, cache)
    step = build_forward_batch(
        [BatchRow(TOKENS[0].tolist(), 0, range(6))], 4, DEVICE, all_wanted=True
    )
    error = (forward.forward(step) - wanted).norm() / wanted.norm()
    assert 0 < error < 0.1


def test_only_wanted_tokens_reach_the_head() -> None:
    decoder = small()
    wanted = whole(decoder)
    forward = ServedModel(decoder, PagedKVCache(decoder, 8, 4))
    rows = [
        BatchRow(TOKENS[0, :9].tolist(), 0, [0, 1, 2]),
        BatchRow(TOKENS[0, :3].tolist(), 0, [3]),
    ]
    read: list[int] = []
    for layer in decoder.layers:
        mlp = layer.get_submodule("mlp")
        mlp.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
    found = forward.forward(build_forward_batch(rows, 4, DEVICE))
    torch.testing.assert_close(found, wanted[[8, 2]], atol=2e-5, rtol=1e-4)
    # Nor what comes behind the last layer's attention.
    assert read == [12] * (len(decoder.layers) - 1) + [2]


def test_positions_beyond_a_learned_table_are_refused() -> None:
    model = msgspec.structs.replace(small().model, positions="learned")
    decoder = made(model)
    with pytest.raises(InputError, match="use at most 64"):
        ServedModel(decoder, PagedKVCache(decoder, 4, 4), max_model_len=65)
