"""`PrefixCache`: blocks of sequences that others find, because they begin alike."""

from meshwright.policy.kv import BlockPool
from meshwright.policy.sequences import Sequence


class PrefixCache:
    """Names the full blocks of sequences, and finds them again."""

    __slots__ = ("_block", "_is_on", "_pool", "hits", "queried")

    def __init__(self, pool: BlockPool, block_tokens: int, *, is_on: bool) -> None:
        self._pool, self._block, self._is_on = pool, block_tokens, is_on
        self.queried = self.hits = 0
        """Tokens of prompts that were looked up, and that were found."""

    def find(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold the beginning of a sequence already; one token is left."""
        if not sequence.keys or not self._is_on or sequence.done:
            return []
        return self._pool.find(sequence.keys, (sequence.tokens - 1) // self._block)

    def use(self, sequence: Sequence, found: int) -> None:
        """Let a sequence begin behind so many blocks that were found.

        It counts once: who made room for others finds its own blocks again.
        """
        sequence.done = found * self._block
        if sequence.cached is None:
            sequence.cached = sequence.done
            if sequence.keys is not None and self._is_on:
                self.queried += sequence.tokens
                self.hits += sequence.done

    def name(self, sequence: Sequence) -> None:
        """Let others find the full blocks of a sequence whose tokens are known."""
        keys = sequence.keys
        if keys is None or not self._is_on:
            return
        full = min(sequence.done // self._block, len(keys), len(sequence.blocks))
        if full > sequence.named:
            self._pool.name(sequence.blocks, keys, sequence.named, full)
            sequence.named = full
