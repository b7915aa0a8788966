"""`PrefixCache`: blocks of sequences that others find, because they begin alike."""

from meshwright.policy.serving.block_pool import BlockPool
from meshwright.policy.serving.sequence import Sequence


class PrefixCache:
    """Names the full blocks of sequences, and finds them again."""

    __slots__ = ("_block", "_is_on", "_pool", "hit_tokens", "queried_tokens")

    def __init__(self, pool: BlockPool, block_tokens: int, *, is_on: bool) -> None:
        self._pool, self._block, self._is_on = pool, block_tokens, is_on
        self.queried_tokens = self.hit_tokens = 0
        """Tokens of prompts that were looked up, and that were found."""

    def find_longest_prefix(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold the beginning of a sequence already; one token is left."""
        if not sequence.block_hashes or not self._is_on or sequence.num_computed_tokens:
            return []
        return self._pool.find_cached_blocks(
            sequence.block_hashes, (sequence.num_tokens - 1) // self._block
        )

    def attach_prefix(self, sequence: Sequence, found: int) -> None:
        """Let a sequence begin behind so many blocks that were found.

        It counts once: who made room for others finds its own blocks again.
        """
        sequence.num_computed_tokens = found * self._block
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if sequence.block_hashes is not None and self._is_on:
                self.queried_tokens += sequence.num_tokens
                self.hit_tokens += sequence.num_computed_tokens

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Let others find the full blocks of a sequence whose tokens are known."""
        keys = sequence.block_hashes
        if keys is None or not self._is_on:
            return
        full = min(sequence.num_computed_tokens // self._block, len(keys), len(sequence.blocks))
        if full > sequence.num_cached_blocks:
            self._pool.cache_full_blocks(sequence.blocks, keys, sequence.num_cached_blocks, full)
            sequence.num_cached_blocks = full
