"""`SequencePlacement`: which sequences run, and the KV blocks that they hold.

The state of a scheduler and the operations that move one sequence: admit, preempt, finish. When
they happen is decided by `Scheduler`.
"""

from collections.abc import Mapping

from meshwright.policy.serving.block_pool import BlockPool, HostBlockPool
from meshwright.policy.serving.prefix_cache import PrefixCache
from meshwright.policy.serving.running_set import DecodeSet, RunningSet
from meshwright.policy.serving.sequence import (
    BlockSwap,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)
from meshwright.policy.serving.waiting_queue import WaitingQueue
from meshwright.spec.scheduler_config import SchedulerConfig


class SequencePlacement:
    """Running sequences with their blocks, and those that wait."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        *,
        tenant_weights: Mapping[str, float] | None = None,
        speculative: bool = False,
    ) -> None:
        """Manage `num_blocks` KV blocks; `tenant_weights` divide steps, equally by default.

        With `speculative`, sequences do not decode by themselves: `set_draft_token_count` says how
        many tokens each proposes for its next step, `accept_draft_tokens` how many were accepted.
        """
        self.config, self.block_pool = config, BlockPool(num_blocks)
        self.host_block_pool = HostBlockPool(config.num_cpu_blocks)
        self.waiting_queue: WaitingQueue[Sequence] = WaitingQueue(tenant_weights)
        self.decode_set = DecodeSet(config.block_size)
        self.num_preemptions = 0
        """How often a sequence made room."""
        self.prefix_cache = PrefixCache(
            self.block_pool, config.block_size, is_on=config.enable_prefix_caching
        )
        self._speculative = speculative
        self.running_set = RunningSet()
        self._ranked = False
        """Whether there has been more than one priority."""
        self._prefilling: dict[Sequence, None] = {}
        self._speculating: dict[Sequence, None] = {}
        self._finished: list[Sequence] = []
        """Those that have all their tokens: let go when the next step is decided."""
        self._copies: list[tuple[int, int]] = []
        self._blocked_head: Sequence | None = None
        """Whose turn it is, where there was no room for it and none has been made since."""
        self._order = 0
        self._kept_free = int(config.watermark * num_blocks)
        self._separate_prefill = not config.enable_chunked_prefill

    @property
    def num_running(self) -> int:
        """Sequences that have a place."""
        return len(self.running_set)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it has met its end, or nobody waits for it."""
        state, sequence.status = sequence.status, SequenceStatus.FINISHED
        if sequence in self.running_set:
            self._leave(sequence)
        elif state is SequenceStatus.WAITING and sequence.arrival_order >= 0:
            self.waiting_queue.remove(sequence)
            self.host_block_pool.free_blocks(sequence.host_blocks)
            self._blocked_head = None

    def reserve_blocks(self, blocks: int, *, all_there_are: bool = False) -> bool:
        """Keep blocks for keys and values on their way; tell whether there are as many.

        The watermark is left for those who run, unless `all_there_are` may be had.
        """
        left = self._kept_free if self.running_set and not all_there_are else 0
        if blocks + left > self.block_pool.free_block_count:
            return False
        self.block_pool.reserve(blocks)
        return True

    def release_reserved_blocks(self, blocks: int) -> None:
        """Give back blocks that were reserved."""
        self.block_pool.unreserve(blocks)
        self._blocked_head = None

    def _has_room(self, sequence: Sequence, found: list[int], beside: int = 0) -> bool:
        if len(self.running_set) >= self.config.max_num_seqs:
            return False
        needed = -(-sequence.num_tokens // self.config.block_size) - len(found)
        if found:
            needed += self.block_pool.count_evictable(found)
        return (
            needed + beside + (self._kept_free if self.running_set else 0)
            <= self.block_pool.free_block_count
        )

    def _place(
        self, batch: SchedulerOutput, sequence: Sequence, found: list[int] | None = None
    ) -> None:
        """Give a sequence its place and its blocks."""
        found = self.prefix_cache.find_longest_prefix(sequence) if found is None else found
        self.running_set.add(sequence)
        if found:
            self.block_pool.touch(found)
        if not sequence.num_computed_tokens:
            self.prefix_cache.attach_prefix(sequence, len(found))
        done, tokens = sequence.num_computed_tokens, sequence.num_tokens
        # It may come with all its keys and values, and with a token that follows them.
        decodes = done >= tokens - (tokens > sequence.num_prompt_tokens)
        sequence.blocks, sequence.num_cached_blocks = found, len(found)
        missing = -(-(done if decodes else tokens) // self.config.block_size) - len(found)
        sequence.num_reserved_blocks = missing
        self.block_pool.reserve(missing)
        batch.admitted.append(sequence)
        if sequence.block_hashes or sequence.forks or sequence.host_blocks:
            self._draw(sequence)
            if held := sequence.host_blocks:
                sequence.host_blocks = []
                batch.swap_in.append(BlockSwap(sequence, sequence.blocks[: len(held)], held))
                self.host_block_pool.free_after_step(held)
        if decodes:
            sequence.num_tokens = done + 1
            batch.started_decoding.append(sequence)
        else:
            sequence.status = SequenceStatus.PREFILLING
            self._prefilling[sequence] = None

    def _preempt(self, batch: SchedulerOutput, sequence: Sequence) -> None:
        """Let a sequence make room: it waits again, at the head of its line."""
        self.num_preemptions += 1
        batch.preempted.append(sequence)
        if sequence.decode_epoch:
            self.decode_set.remove(sequence)
        # Not those of tokens still to be computed, or that were guessed wrong.
        kept = -(-sequence.num_computed_tokens // self.config.block_size)
        if self.config.preemption_mode == "swap" and (
            away := self.host_block_pool.try_allocate(kept)
        ):
            self._draw(sequence)
            sequence.host_blocks = away
            batch.swap_out.append(BlockSwap(sequence, sequence.blocks[:kept], sequence.host_blocks))
            self._leave(sequence)
        else:
            self._leave(sequence)
            sequence.num_computed_tokens = 0
        sequence.status, sequence.num_draft_tokens = SequenceStatus.WAITING, 0
        self.waiting_queue.push(sequence, first=True)

    def _leave(self, sequence: Sequence) -> None:
        """Take away a place and its blocks."""
        if sequence.decode_epoch:
            self.decode_set.remove(sequence)
        else:
            self._prefilling.pop(sequence, None)
            self._speculating.pop(sequence, None)
        self.running_set.remove(sequence)
        if sequence.block_hashes:
            self.prefix_cache.cache_full_blocks(sequence)
        if sequence.blocks:
            self.block_pool.free_blocks(sequence.blocks)
            sequence.blocks = []
        self.block_pool.unreserve(sequence.num_reserved_blocks)
        sequence.num_reserved_blocks = sequence.num_cached_blocks = 0
        self._blocked_head = None

    def _draw(self, sequence: Sequence) -> None:
        if sequence.num_reserved_blocks:
            sequence.blocks = sequence.blocks + self.block_pool.allocate(
                sequence.num_reserved_blocks
            )
            sequence.num_reserved_blocks = 0
