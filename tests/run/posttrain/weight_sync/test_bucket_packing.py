"""Any damage breaks a seal: bits that flip, alone or in patterns, and words out of place."""

import random
from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="moves weights")

import torch
from torch import Tensor

from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.policy.resharding.weight_transfer import TensorSlice, WeightBucket
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync import bucket_packing
from meshwright.run.posttrain.weight_sync.bucket_packing import (
    CorruptBucketError,
    compute_bucket_bytes,
    pack_bucket,
    verify_bucket,
)

VERSION, PLAN = 7, 99
SHAPE = (64, 48)


def parcel_of(*shapes: tuple[int, ...], wire: str = "fp32") -> WeightBucket:
    """Return a parcel of whole tensors, named by their numbers."""
    slices, starts, end = [], [], 0
    for number, shape in enumerate(shapes):
        box = TensorBox((0,) * len(shape), shape)
        slices.append(TensorSlice(str(number), box, 0, (0,), (wire,), wire))
        starts.append(end)
        end += -(-slices[-1].size_bytes // 16) * 16
    return WeightBucket(0, 0, (0,), tuple(slices), tuple(starts), end)


def packed(parcel: WeightBucket, dtype: torch.dtype = torch.float32) -> Tensor:
    chance = torch.Generator().manual_seed(0)
    tensors = {
        each.tensor_name: ShardedTensor.unsharded(
            torch.randn(each.box.sizes, generator=chance).to(dtype)
        )
        for each in parcel.slices
    }
    made = torch.empty(compute_bucket_bytes(parcel), dtype=torch.uint8)
    pack_bucket(parcel, tensors, VERSION, PLAN, made)
    return made


def is_sound(parcel: WeightBucket, sent: Tensor) -> bool:
    try:
        verify_bucket(parcel, sent, VERSION, PLAN)
    except CorruptBucketError:
        return False
    return True


def words(sent: Tensor) -> Tensor:
    return sent[: -bucket_packing.TRAILER_BYTES].view(torch.int64)


def flip(word: Tensor, bit: int) -> None:
    word ^= (1 << bit) - (1 << 64 if bit == 63 else 0)


def two_signs(sent: Tensor) -> None:
    flip(words(sent)[10:11], 63)
    flip(words(sent)[20:21], 63)


def every_fourth_sign(sent: Tensor) -> None:
    sent[: -bucket_packing.TRAILER_BYTES].view(torch.float32)[1::4] *= -1


def every_eighth_half_sign(sent: Tensor) -> None:
    sent[: -bucket_packing.TRAILER_BYTES].view(torch.bfloat16)[3::8] *= -1


def every_sign(sent: Tensor) -> None:
    sent[: -bucket_packing.TRAILER_BYTES].view(torch.float32)[:] *= -1


def every_bit(sent: Tensor) -> None:
    words(sent)[:] = ~words(sent)


def neighbours_swapped(sent: Tensor) -> None:
    words(sent)[[300, 301]] = words(sent)[[301, 300]]


def far_words_swapped(sent: Tensor) -> None:
    words(sent)[[3, 3 + 4 * 256]] = words(sent)[[3 + 4 * 256, 3]]


def halves_swapped(sent: Tensor) -> None:
    halves = words(sent).view(torch.int32).view(-1, 2)
    halves[:] = halves.flip(1).clone()


def tensors_swapped(sent: Tensor) -> None:
    tensors = sent[: -bucket_packing.TRAILER_BYTES].view(3, -1)
    tensors[[0, 1]] = tensors[[1, 0]]


def rows_swapped(sent: Tensor) -> None:
    rows = sent[: -bucket_packing.TRAILER_BYTES].view(3 * SHAPE[0], -1)
    rows[[1, 9]] = rows[[9, 1]]


def one_place_late(sent: Tensor) -> None:
    words(sent)[:] = words(sent).roll(1)


def backwards(sent: Tensor) -> None:
    words(sent)[:] = words(sent).flip(0)


def page_zeroed(sent: Tensor) -> None:
    sent[4096:8192] = 0


DAMAGES = (
    two_signs, every_fourth_sign, every_eighth_half_sign, every_sign, every_bit,
    neighbours_swapped, far_words_swapped, halves_swapped, tensors_swapped, rows_swapped,
    one_place_late, backwards, page_zeroed,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_damage_with_a_pattern_is_seen(damage: Callable[[Tensor], None], wire: str) -> None:
    parcel = parcel_of(SHAPE, SHAPE, SHAPE, wire=wire)
    sent = packed(parcel)
    assert is_sound(parcel, sent)
    damage(sent)
    assert not is_sound(parcel, sent)


def test_words_that_change_places_in_pairs_are_seen() -> None:
    parcel = parcel_of((512,))
    sent = torch.zeros(compute_bucket_bytes(parcel), dtype=torch.uint8)
    # Of a, b, b, a and b, a, a, b both the sums and the sums by place are the same.
    words(sent)[:4] = torch.tensor([5, 9, 9, 5])
    seal = bucket_packing._seal(sent[: parcel.size_bytes], VERSION, PLAN)
    sent[parcel.size_bytes :] = seal.view(torch.uint8)
    assert is_sound(parcel, sent)
    words(sent)[:4] = torch.tensor([9, 5, 5, 9])
    assert not is_sound(parcel, sent)


@pytest.mark.parametrize("like", ["weights", "zeros"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 16])
def test_bits_that_flip_anywhere_are_seen(count: int, like: str) -> None:
    parcel = parcel_of(SHAPE, (33,))
    sent = packed(parcel)
    if like == "zeros":
        words(sent)[:] = 0
        sent[parcel.size_bytes :] = bucket_packing._seal(words(sent), VERSION, PLAN).view(
            torch.uint8
        )
    chance = random.Random(count)
    for bit in (*range(64), *[None] * 200):
        hurt = sent.clone()
        # The same bit of all, which is likeliest to cancel, and then any.
        for place in chance.sample(range(len(words(sent))), count):
            flip(words(hurt)[place : place + 1], chance.randrange(64) if bit is None else bit)
        assert not is_sound(parcel, hurt)


@pytest.mark.parametrize("count", [2, 256, 258, 128 * 256, 128 * 256 + 514])
def test_the_sums_are_those_of_the_formula(count: int) -> None:
    chance = torch.Generator().manual_seed(count)
    given = torch.randint(-(2**62), 2**62, (count,), generator=chance) * 2 + 1
    wrap, odd = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def fold(word: int) -> int:
        return word ^ word >> 32

    plain = placed = 0
    filled = [*given.tolist(), *[0] * (-count % 256)]
    for place, word in enumerate(filled):
        row, column = place // 256 + 1, place % 256 + 1
        mixed = fold((word & wrap) ^ (column * odd & wrap)) * (2 * row + 1) * odd & wrap
        plain += fold(mixed)
        placed += (256 * row + column) * fold(mixed)
    found = bucket_packing._seal(given.view(torch.uint8), VERSION, PLAN).tolist()
    assert [each & wrap for each in found] == [VERSION, PLAN, plain & wrap, placed & wrap]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", [2, 258, (1 << 22) + 514])
def test_a_gpu_seals_as_a_processor_does(count: int) -> None:
    given = torch.randint(-(2**62), 2**62, (count,)).view(torch.uint8)
    here, there = (bucket_packing._seal(each, VERSION, PLAN) for each in (given, given.cuda()))
    assert here.tolist() == there.tolist()
