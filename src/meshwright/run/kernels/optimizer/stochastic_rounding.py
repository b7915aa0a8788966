"""Rounding to bfloat16 by chance, so that steps too small for bfloat16 still count on average.

A weight of 1 moves by 2⁻⁸ in bfloat16 or not at all. Rounded to the nearest, an update of 1e-5
would be lost every time; rounded up with a probability equal to the fraction that is cut off, the
expected weight is exact.

The random bits are a hash of (tensor key, step, index of the element): no state to save, the same
bits after a resume, on every device, however tensors are grouped or cut. Indices count modulo 2³²,
so elements four billion places apart share theirs. Each function is here twice, for Triton and for
torch, and both give the same bits.

Bits of weights and first moments are unrelated from step to step. Those of a second moment begin
anywhere and go on by the golden ratio: a moment that creeps by a hundredth of a code in each step
then moves after about a hundred steps, not after a number that is itself left to chance.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from hashlib import blake2b
from typing import NamedTuple

import torch

from meshwright.run.kernels.triton_compat import tl, triton

# Multipliers of "lowbias32" from Chris Wellons' hash-prospector (public domain), found by search
# for a hash in which each input bit changes each output bit with a probability near 1/2; the third
# is 2³² over the golden ratio.
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B
GOLDEN_RATIO_HASH = 0x9E3779B1
_FIRST_FACTOR = tl.constexpr(FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(SECOND_FACTOR)
_GOLDEN = tl.constexpr(GOLDEN_RATIO_HASH)
_MASK = 0xFFFFFFFF


def make_tensor_key(name: str, seed: int) -> int:
    """Return the key of a tensor: 63 bits that follow from its name and the seed of the run."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@triton.jit
def make_rounding_keys(key, step):
    """Return 32 bits of a tensor, two numbers of it in this step, and one of the step alone."""
    low = _mix(key.to(tl.uint32))
    factor = _mix(_mix((key >> 32).to(tl.uint32) ^ low) ^ step.to(tl.uint32))
    return low, factor | 1, _mix(factor ^ low), step.to(tl.uint32) * _GOLDEN


@triton.jit
def generate_random_bits(keys, index):
    """Return 32 bits for each element's weight and 24 each for its first and second moment.

    `keys` are those of the step, `index` is uint32. Whoever needs fewer bits takes the highest.
    """
    low, factor, offset, turn = keys
    bits = (index + low) * _FIRST_FACTOR
    steady = (bits ^ (bits >> 16)) * _SECOND_FACTOR
    # High bits of factor · x + offset are independent for any two x where factor and offset are
    # random (Dietzfelbinger 1996, "Universal hashing and k-wise independent random variables via
    # integer arithmetic without primes"): so any two elements are unrelated from step to step.
    bits = steady * factor + offset
    return bits, bits & 0xFFFFFF, (steady + turn) >> 8


@triton.jit
def stochastic_round_bf16(value, bits):
    """Round float32 to a bfloat16 neighbour by the high 16 bits of chance."""
    exact = value.to(tl.uint32, bitcast=True)
    # Adding to the bits of a NaN could make a number of it.
    is_number = value == value  # noqa: PLR0124
    rounded = tl.where(is_number, exact + (bits >> 16), 0x7FC00000)
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _mix(bits):
    bits = bits * _FIRST_FACTOR
    bits = (bits ^ (bits >> 16)) * _SECOND_FACTOR
    return bits ^ (bits >> 15)


class RoundingKeys(NamedTuple):
    """What `make_rounding_keys` returns."""

    low: int
    factor: int
    offset: int
    turn: int


class RandomBits(NamedTuple):
    """Random bits of elements, as int64: 32 for the weight, 24 for each moment."""

    weight: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor


def make_rounding_keys_reference(key: int, step: int) -> RoundingKeys:
    """Do what `make_rounding_keys` does."""
    low = _plain_mix(torch.tensor(key & _MASK))
    factor = _plain_mix(_plain_mix(((key >> 32) & _MASK) ^ low) ^ (step & _MASK))
    offset = _plain_mix(factor ^ low)
    return RoundingKeys(int(low), int(factor) | 1, int(offset), (step * GOLDEN_RATIO_HASH) & _MASK)


def generate_random_bits_reference(keys: RoundingKeys, index: torch.Tensor) -> RandomBits:
    """Do what `generate_random_bits` does."""
    bits = ((index + keys.low) * FIRST_FACTOR) & _MASK
    steady = ((bits ^ (bits >> 16)) * SECOND_FACTOR) & _MASK
    bits = (steady * keys.factor + keys.offset) & _MASK
    return RandomBits(bits, bits & 0xFFFFFF, ((steady + keys.turn) & _MASK) >> 8)


def stochastic_round_bf16_reference(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Do what `stochastic_round_bf16` does."""
    exact = value.view(torch.int32).to(torch.int64)
    # int64 keeps the sign's bit pattern; only the low 32 bits are looked at.
    rounded = ((exact + (bits >> 16)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isnan(value), value.to(torch.bfloat16), rounded)


def _plain_mix(bits: torch.Tensor) -> torch.Tensor:
    # Products of two 32-bit numbers wrap around in int64; their low 32 bits stay right.
    bits = (bits * FIRST_FACTOR) & _MASK
    bits = ((bits ^ (bits >> 16)) * SECOND_FACTOR) & _MASK
    return bits ^ (bits >> 15)
