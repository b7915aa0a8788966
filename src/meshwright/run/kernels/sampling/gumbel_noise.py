"""Noise for draws that follows from (seed, position, stream, token) alone, on any device.

No generator has a state, so a request draws the same tokens whatever runs beside it, and the same
again after it was preempted. A token of probability p is drawn by the largest log p + g, where the
g are Gumbel noise: -log of exponential noise, itself a hash made uniform. Each function is here
twice, for Triton and for torch, with the same bits (logarithms may differ in the last place).

Streams tell draws of one position apart: a token, whether a proposal is taken, what replaces it.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math

import torch

from meshwright.run.kernels.triton_compat import INTERPRETED, tl, triton

TOKEN, TAKEN, REPLACED, PROPOSED = range(4)

# The shifts and multipliers of "lowbias32" from Chris Wellons' hash-prospector (public domain), and
# 2³² over the golden ratio.
_FIRST, _SECOND, _GOLDEN = 0x7FEB352D, 0x846CA68B, 0x9E3779B1
_FIRST_FACTOR = tl.constexpr(_FIRST)
_SECOND_FACTOR = tl.constexpr(_SECOND)
_GOLDEN_FACTOR = tl.constexpr(_GOLDEN)
_MASK = 0xFFFFFFFF
# Below this a series takes the place of log(1 - u), which would have lost its last places.
_SMALL = 1 / 64
_SMALL_CONSTANT = tl.constexpr(_SMALL)
_MOST = 1 - 2.0**-24
_MOST_CONSTANT = tl.constexpr(_MOST)
_LN_2 = tl.constexpr(math.log(2))
_UNIT = 2.0**-32
_UNIT_CONSTANT = tl.constexpr(_UNIT)


@triton.jit
def derive_noise_keys(seed, position, stream):
    """Return two numbers of 32 bits for one draw."""
    low = _mix(seed.to(tl.uint32))
    high = _mix((seed >> 32).to(tl.uint32) ^ low)
    turn = _mix(position.to(tl.uint32) + ((stream * _GOLDEN_FACTOR) & 0xFFFFFFFF))
    first = _mix(low ^ turn)
    return first, _mix(high + first)


@triton.jit
def gumbel_noise(first, second, index):
    """Return the Gumbel noise of the tokens `index`."""
    bits = _mix(_mix(index.to(tl.uint32) * _GOLDEN_FACTOR + first) ^ second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * _UNIT_CONSTANT, _MOST_CONSTANT)
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3 + uniform * 0.25)))
    return -_log(tl.where(uniform < _SMALL_CONSTANT, series, -_log(1 - uniform)))


@triton.jit
def _log(x):
    # One instruction, good to 2⁻²² here; the library's logarithm is twenty, which a step of many
    # lines over a large vocabulary spends half its drawing on.
    if INTERPRETED:
        two = tl.log2(x)
    else:
        two = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
        )
    return two * _LN_2


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 16)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> 15)) * _SECOND_FACTOR
    return bits ^ (bits >> 16)


def derive_noise_keys_reference(
    seed_L: torch.Tensor, position_L: torch.Tensor, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `derive_noise_keys` does for many draws; both results are int64."""
    low = _plain_mix(seed_L)
    high = _plain_mix((seed_L >> 32) ^ low)
    turn = _plain_mix(position_L + stream * _GOLDEN)
    first = _plain_mix(low ^ turn)
    return first, _plain_mix(high + first)


def gumbel_noise_reference(
    keys: tuple[torch.Tensor, torch.Tensor], index: torch.Tensor
) -> torch.Tensor:
    """Do what `gumbel_noise` does; keys and index are broadcast."""
    uniform = uniform_noise_reference(keys, index)
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3 + uniform * 0.25)))
    return -torch.where(uniform < _SMALL, series, -(1 - uniform).log()).log()


def uniform_noise_reference(
    keys: tuple[torch.Tensor, torch.Tensor], index: torch.Tensor
) -> torch.Tensor:
    """Return numbers between 0 and 1, neither of which is reached."""
    bits = _plain_mix(_plain_mix(index * _GOLDEN + keys[0]) ^ keys[1])
    return ((bits.float() + 0.5) * _UNIT).clamp(max=_MOST)


def _plain_mix(bits: torch.Tensor) -> torch.Tensor:
    # Products of two 32-bit numbers wrap around in int64; their low 32 bits stay right.
    bits = bits & _MASK
    bits = ((bits ^ (bits >> 16)) * _FIRST) & _MASK
    bits = ((bits ^ (bits >> 15)) * _SECOND) & _MASK
    return bits ^ (bits >> 16)
