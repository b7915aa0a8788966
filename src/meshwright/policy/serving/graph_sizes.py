"""What steps are padded to where they are replayed as graphs: decode steps, and mixed ones.

A graph is captured for one number of tokens. Few graphs start quickly, many leave little padding:
so they are near each other where steps are short, and further apart where they are long.
"""

from bisect import bisect_left
from functools import lru_cache

_STRIDES = ((512, 32), (1024, 64), (1 << 62, 128))
"""Up to so many tokens, one size every so many."""


def list_decode_graph_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of rows worth a graph: 1, 2, 4, 8, 16, then every eighth up to `most`."""
    return tuple(sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most}))


@lru_cache(maxsize=64)
def list_mixed_graph_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes of steps of at most so many tokens; none where that is 0."""
    sizes: list[int] = []
    size = 0
    while size < most:
        size += next(stride for reach, stride in _STRIDES if size < reach)
        sizes.append(min(size, most))
    return tuple(sizes)


def find_padded_size(tokens: int, draws: int, most: int) -> int:
    """Return what a step is padded to; 0 where no graph is large enough.

    Of its tokens some draw: several choices of one prompt may be more than there are tokens.
    """
    sizes = list_mixed_graph_sizes(most)
    place = bisect_left(sizes, max(tokens, draws))
    return sizes[place] if tokens and place < len(sizes) else 0
