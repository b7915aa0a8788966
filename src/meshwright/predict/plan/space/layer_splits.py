"""Layers over the chunks of a pipeline: evenly, or balanced by what they cost.

A chunk with the embedding or the head, or with expert layers among dense ones, takes longer than
its number of layers says. `split_balanced` finds the split whose slowest chunk is fastest, exactly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def split_evenly(layers: int, chunks: int) -> tuple[int, ...]:
    """Return the split closest to even; what does not divide leaves the ends short.

    They hold the embedding and the head; Llama 3 405B was trained with its 126 layers so divided
    (arXiv 2407.21783).
    """
    each, rest = divmod(layers, chunks)
    if not rest:
        return (each,) * chunks
    split = [each + 1] * chunks
    for index in [chunks - 1, 0, *range(chunks - 2, 0, -1)][: chunks - rest]:
        split[index] = each
    return tuple(split)


def split_balanced(
    costs: Sequence[float], chunks: int, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return the split of layers into chunks, none empty, whose largest cost is least.

    `costs` are those of the layers in order, `first` and `last` what the ends add. Whether a
    largest cost can be kept is decided by filling chunks one after the other, so the least of them
    is found by halving; what it leaves open is spread evenly.
    """
    if chunks == 1:
        return (len(costs),)
    row = _Row([0.0, *accumulate(costs)], chunks, first, last)
    low, high = row.whole / chunks * (1 - 1e-9), row.largest(split_evenly(len(costs), chunks))
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        if row.reach(middle)[-1] < len(costs):
            low = middle
        else:
            high = middle
    return row.even_within(high)


_CLOSE = 1e-9
"""How closely the least largest cost is found, as a share of it."""


class _Row:
    """Layers in a row that are cut into chunks."""

    def __init__(self, prefix: list[float], chunks: int, first: float, last: float) -> None:
        self.prefix, self.chunks = prefix, chunks
        self.extra = [first, *(chunks - 2) * [0.0], last]
        self.whole = prefix[-1] + first + last

    def largest(self, split: Sequence[int]) -> float:
        """Return the largest cost of a split."""
        ends = [0, *accumulate(split)]
        runs = zip(pairwise(ends), self.extra, strict=True)
        return max(self.prefix[b] - self.prefix[a] + extra for (a, b), extra in runs)

    def reach(self, most: float) -> list[int]:
        """Return how many layers the first 0, 1, 2 … chunks can hold, each up to `most`."""
        found, layers = [0], len(self.prefix) - 1
        for index, extra in enumerate(self.extra):
            limit = self.prefix[found[-1]] + most - extra
            end = bisect_right(self.prefix, limit * (1 + 1e-12)) - 1
            # Every chunk after this one needs a layer, too.
            found.append(min(max(end, 0), layers - (self.chunks - 1 - index)))
            if found[-1] <= found[-2]:
                return [*found[:-1], 0]  # this chunk would be empty
        return found

    def even_within(self, most: float) -> tuple[int, ...]:
        """Return a split that keeps to `most`, chunks as equal in cost as they may be."""
        prefix, reach = self.prefix, self.reach(most)
        end, left, split = len(prefix) - 1, self.whole, list[int]()
        for index in range(self.chunks - 1, 0, -1):
            extra = self.extra[index]
            wanted = prefix[end] - max(0.0, left / (index + 1) - extra)
            start = bisect_left(prefix, wanted)
            if start > 0 and wanted - prefix[start - 1] < prefix[start] - wanted:
                start -= 1
            least = bisect_left(prefix, prefix[end] + extra - most * (1 + 1e-12))
            start = min(max(start, least, index), reach[index], end - 1)
            split.append(end - start)
            left -= prefix[end] - prefix[start] + extra
            end = start
        return (end, *reversed(split))
