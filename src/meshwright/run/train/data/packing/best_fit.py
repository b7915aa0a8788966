"""Best-fit-decreasing packing: longest item first, each into the fullest bin that takes it.

Ding et al. 2024 (arXiv 2404.10830) pack documents this way for training. Bins of equal capacity
form a stack, and one long whole number has a bit for every capacity that some bin has, so that the
fullest bin with capacity for an item is the lowest bit from its length up: a shift and a count, for
any number of bins.
"""

import numpy as np
from numpy.typing import NDArray

from meshwright.run.train.data.corpus.corpus import Ints


def best_fit(lengths: Ints, capacity: int) -> NDArray[np.int64]:
    """Return the bin of each item; bins are numbered from 0, in the order they were opened."""
    assert not lengths.size or 0 < lengths.min() <= lengths.max() <= capacity
    order = np.argsort(-lengths, kind="stable")
    found = np.empty(len(lengths), np.int64)
    found[order] = _packed(lengths[order].tolist(), capacity)
    return found


def _packed(lengths: list[int], capacity: int) -> list[int]:
    """Pack items that come longest first."""
    stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, opened = 0, 0
    found: list[int] = []
    for length in lengths:
        fitting = rooms >> length
        if fitting:
            left = (fitting & -fitting).bit_length() - 1
            stack = stacks[length + left]
            chosen = stack.pop()
            if not stack:
                rooms ^= 1 << (length + left)
        else:
            left = capacity - length
            chosen = opened
            opened += 1
        if left:
            stack = stacks[left]
            if not stack:
                rooms |= 1 << left
            stack.append(chosen)
        found.append(chosen)
    return found
