"""Names for the blocks of prompts that begin alike, in the size of an engine's own blocks."""

from collections.abc import Iterable

from meshwright.spec.workload import Request


class PrefixKeys:
    """Gives every block of a prompt a number that tells all tokens up to its end."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._chains: dict[tuple[int, int, int], int] = {}

    def of(self, request: Request) -> list[int] | None:
        """Return the keys of the full blocks that other prompts may share; None without any."""
        block, size, chain = self._block, request.block_tokens, -1
        # So many blocks of the engine, and one more, may end within one of the trace.
        most = size // block + 1
        keys: list[int] = []
        for place, name in enumerate(request.prefix_blocks):
            link = (chain, name, size)
            found = self._chains.get(link)
            if found is None:
                found = self._chains[link] = len(self._chains)
            chain = found
            count = (place + 1) * size // block - place * size // block
            keys += range(chain * most, chain * most + count)
        # The last block of the trace may be partly filled.
        del keys[request.prompt_tokens // block :]
        return keys or None


def fresh_tokens(requests: Iterable[Request]) -> list[int]:
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
