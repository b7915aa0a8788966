"""Integers that make a dict of CPython probe the places of nearly all others for each of them."""

from functools import cache

import numpy as np
import numpy.typing as npt

_SHIFT = 5
"""`PERTURB_SHIFT` of CPython's dictobject.c."""


@cache
def integers_on_one_probe_chain(bits: int) -> list[int]:
    """Return about two thirds of `2**bits` integers, as many as a dict of this size can hold.

    A dict looks for a key at `5 i + perturb + 1`, where `perturb`, the key shifted, is soon zero.
    The first half fill one stretch of the sequence `5 i + 1`; each of the others comes to the
    begin of the stretch and has to walk to its end.
    """
    size = 1 << bits
    orbit, at = np.empty(size // 3, np.int64), 1
    for place in range(len(orbit)):
        orbit[place], at = at, (5 * at + 1) % size
    place_on_orbit = np.full(size, size, np.int64)
    place_on_orbit[orbit] = np.arange(len(orbit))
    walkers: list[npt.NDArray[np.int64]] = []
    first = size
    while sum(map(len, walkers)) < len(orbit) - 64:
        keys = np.arange(first, first + (size << 3), dtype=np.int64)
        first += len(keys)
        spot, perturb = keys % size, keys.copy()
        good = place_on_orbit[spot] < size
        while perturb.any():
            perturb >>= _SHIFT
            spot = (5 * spot + perturb + 1) % size
            good &= place_on_orbit[spot] < size
        good &= place_on_orbit[spot] < len(orbit) // 8
        walkers.append(keys[good])
    found: list[int] = [*orbit.tolist(), *np.concatenate(walkers).tolist()]
    return found[: 2 * len(orbit) - 64]
