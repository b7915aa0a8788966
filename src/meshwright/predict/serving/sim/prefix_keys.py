"""Names for the blocks of prompts that begin alike, in the size of an engine's own blocks."""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from meshwright.spec.workload import WorkloadRequest

Ints = npt.NDArray[np.int64]


class PrefixBlockKeys:
    """Gives every block of a prompt a number that tells all tokens up to its end."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._chains: dict[tuple[int, int, int], int] = {}
        self._spread: dict[int, tuple[Ints, Ints]] = {}
        """For each size of a trace's blocks: in which of them the engine's end, and as which."""

    def get_keys(self, request: WorkloadRequest) -> "array[int] | None":
        """Return the keys of the full blocks that other prompts may share; None without any."""
        block, size, chain = self._block, request.block_tokens, -1
        chains, links = self._chains, []
        for name in request.prefix_blocks:
            chain = chains.setdefault((chain, name, size), len(chains))
            links.append(chain)
        # The last block of the trace may be partly filled.
        count = min(len(links) * size, request.prompt_tokens) // block
        if not count:
            return None
        places, offsets = self._spread.get(size, ((), ()))
        if len(places) < count:
            places, offsets = self._spread[size] = self._ends(size, 2 * count)
        # So many blocks of the engine, and one more, may end within one of the trace.
        found = np.array(links)[places[:count]] * (size // block + 1) + offsets[:count]
        return array("q", found.tobytes())

    def _ends(self, size: int, count: int) -> tuple[Ints, Ints]:
        """Return in which block of the trace each of the engine's ends, and as which of them."""
        numbers = np.arange(count)
        places = ((numbers + 1) * self._block - 1) // size
        return places, numbers - places * size // self._block


def count_uncached_tokens(requests: Iterable[WorkloadRequest]) -> list[int]:
    """Return how many tokens of each prompt none before it began with: what no cache has.

    One is always computed anew, for the token that follows it.
    """
    chains: dict[tuple[int, int, int], int] = {}
    found = []
    for request in requests:
        chain, shared, size = -1, 0, request.block_tokens
        for name in request.prefix_blocks:
            link = (chain, name, size)
            known = chains.get(link)
            if known is None:
                known = chains[link] = len(chains)
            else:
                shared += size
            chain = known
        found.append(max(1, request.prompt_tokens - shared))
    return found
