"""Rounding to bfloat16 by chance, so that steps too small for bfloat16 still count on average.

A weight of 1 moves by 2⁻⁸ in bfloat16 or not at all. Rounded to the nearest, an update of 1e-5
would be lost every time; rounded up with a probability equal to the fraction that is cut off, the
expected weight is exact.

The random bits are a hash of (tensor key, step, index of the element): no state to save, the same
bits after a resume, on every device, however tensors are grouped or cut. Indices count modulo 2³²,
so elements four billion places apart share theirs. Each function is here twice, for Triton and for
torch, and both give the same bits.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from hashlib import blake2b

import torch

from meshwright.run.kernels.language import tl, triton

# "lowbias32" of Chris Wellons' hash-prospector (public domain), found by search: changing one input
# bit changes every output bit with a probability of 1/2 ± 0.1 %. About 10 integer operations, where
# Philox takes a hundred; at 14 bytes a parameter an H200 leaves room for fewer than 100 in all.
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B
THIRD_FACTOR = 0x9E3779B1
_FIRST_FACTOR = tl.constexpr(FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(SECOND_FACTOR)
_THIRD_FACTOR = tl.constexpr(THIRD_FACTOR)
_MASK = 0xFFFFFFFF


def tensor_key(name: str, seed: int) -> int:
    """Return the key of a tensor: 63 bits that follow from its name and the seed of the run."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@triton.jit
def step_keys(key, step):
    """Return two keys of 32 bits for one tensor in one step."""
    low = _mix(key.to(tl.uint32) ^ step.to(tl.uint32), 0)
    return low, _mix((key >> 32).to(tl.uint32) ^ low, 0)


@triton.jit
def random_bits(low, high, index):
    """Return 32 random bits for each index (of type uint32)."""
    # The second key enters half-way: keys that differ then give unrelated sequences, not the same
    # sequence from another place on.
    return _mix(index ^ low, high)


@triton.jit
def more_bits(bits):
    """Return 32 further bits, whose low half looks independent of the given ones."""
    bits = bits * _THIRD_FACTOR
    return bits ^ (bits >> 15)


@triton.jit
def round_to_bfloat16(value, bits):
    """Round float32 to a bfloat16 neighbour by the low 16 bits of chance."""
    exact = value.to(tl.uint32, bitcast=True)
    rounded = ((exact + (bits & 0xFFFF)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    # Adding to the bits of a NaN could make a number of it.
    is_number = value == value  # noqa: PLR0124
    return tl.where(is_number, rounded, value.to(tl.bfloat16))


@triton.jit
def _mix(bits, key):
    bits = (bits ^ (bits >> 16)) * _FIRST_FACTOR
    bits = ((bits ^ (bits >> 15)) ^ key) * _SECOND_FACTOR
    return bits ^ (bits >> 16)


def plain_step_keys(key: int, step: int) -> tuple[int, int]:
    """Do what `step_keys` does."""
    low = _plain_mix(torch.tensor((key ^ step) & _MASK), 0)
    high = _plain_mix(((key >> 32) & _MASK) ^ low, 0)
    return int(low), int(high)


def plain_random_bits(low: int, high: int, index: torch.Tensor) -> torch.Tensor:
    """Do what `random_bits` does; bits are in the low half of int64."""
    return _plain_mix((index & _MASK) ^ low, high)


def plain_more_bits(bits: torch.Tensor) -> torch.Tensor:
    """Do what `more_bits` does."""
    bits = (bits * THIRD_FACTOR) & _MASK
    return bits ^ (bits >> 15)


def plain_round_to_bfloat16(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Do what `round_to_bfloat16` does."""
    exact = value.view(torch.int32).to(torch.int64)
    # int64 keeps the sign's bit pattern; only the low 32 bits are looked at.
    rounded = ((exact + (bits & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isnan(value), value.to(torch.bfloat16), rounded)


def _plain_mix(bits: torch.Tensor, key: int) -> torch.Tensor:
    # Products of two 32-bit numbers wrap around in int64; their low 32 bits stay right.
    bits = ((bits ^ (bits >> 16)) * FIRST_FACTOR) & _MASK
    bits = (((bits ^ (bits >> 15)) ^ key) * SECOND_FACTOR) & _MASK
    return bits ^ (bits >> 16)
