"""A keyed shuffle that needs no memory: place `i` of `n` goes to `permute_indices([i], n, key)`.

A Feistel network over pairs (x, y) with x < a and y < b, where a·b is the first such product from
`n` up (a = ⌈√n⌉), so that almost no place falls outside and has to walk on ("cycle walking":
Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", method 3). Each round adds to one
half, modulo its size, a hash of the other; adding is undone by subtracting, so every round is a
bijection whatever the hash. It is meant to mix, not to keep secrets.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

ROUNDS = 6
MAX_ELEMENTS = 1 << 62
"""Places up to which the halves, and a hash times a half, fit 64 bits."""
_CHUNK = 1 << 15
"""Places shuffled at a time: the six arrays of one chunk stay in the second-level cache."""

# Odd constants of the SplitMix64 generator (Steele, Lea and Flood 2014).
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)
_FOLD = np.uint64(29)


def make_permutation_key(*parts: object) -> tuple[int, ...]:
    """Make the round keys from whatever names the shuffle: a seed, a purpose, an epoch."""
    text = "\x1f".join(str(part) for part in parts).encode()
    digest = hashlib.blake2b(text, digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 8 * ROUNDS, 8))


def permute_indices(places: Indices, count: int, key: Sequence[int]) -> Indices:
    """Return where each place from 0 up to `count` goes; no two go to the same."""
    assert 0 < count < MAX_ELEMENTS
    if places.size <= _CHUNK:
        return _shuffled(places, count, key)
    found = np.empty(places.shape, np.int64)
    for at in range(0, places.size, _CHUNK):
        found[at : at + _CHUNK] = _shuffled(places[at : at + _CHUNK], count, key)
    return found


def _shuffled(places: Indices, count: int, key: Sequence[int]) -> Indices:
    width = math.isqrt(count - 1) + 1
    height = -(-count // width)
    found = _rounds(places.astype(np.uint64), width, height, key)
    outside = np.flatnonzero(found >= count)
    while outside.size:
        found[outside] = _rounds(found[outside], width, height, key)
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def _rounds(
    places: NDArray[np.uint64], width: int, height: int, key: Sequence[int]
) -> NDArray[np.uint64]:
    sizes = (np.uint64(width), np.uint64(height))
    upper = places // sizes[0]
    halves = [places - upper * sizes[0], upper]
    hashed = np.empty_like(places)
    folded = np.empty_like(places)
    for number, round_key in enumerate(key):
        changed, other = halves[number & 1], halves[1 - (number & 1)]
        size = sizes[number & 1]
        np.add(other, np.uint64(round_key), out=hashed)
        hashed *= _SPREAD
        np.right_shift(hashed, _FOLD, out=folded)
        hashed ^= folded
        hashed *= _MIX
        hashed >>= _HALF
        # The upper half of a 32-bit hash times the size is uniform below the size.
        hashed *= size
        hashed >>= _HALF
        changed += hashed
        # Back below the size: where it is already, subtracting wraps round to a huge number.
        np.subtract(changed, size, out=hashed)
        np.minimum(changed, hashed, out=changed)
    found: NDArray[np.uint64] = halves[1] * sizes[0] + halves[0]
    return found
