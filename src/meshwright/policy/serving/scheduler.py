"""`Scheduler`: which tokens of which requests one step computes. It knows no clock and no device.

Every step serves all sequences that decode, then parts of prompts as far as the step has room
(Sarathi-Serve, arXiv 2403.02310), then those whose turn it is. Blocks of a whole prompt are
promised when it is admitted; a sequence that decodes gets a further one when it needs it. Where
none is left, the one that came last with the lowest priority makes room.

A step is decided before the one before it is done: a sequence that may go on counts as going on,
and `finish` takes it out when its end is seen. So a device never waits for a decision.
`schedule_decode_steps` decides many steps at once in which there is nothing but decoding, exactly
as `schedule` would one by one.
"""

from meshwright.errors import InputError, Problem
from meshwright.policy.serving.sequence import (
    BlockSwap,
    ScheduledChunk,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)
from meshwright.policy.serving.sequence_placement import SequencePlacement

__all__ = [
    "BlockSwap",
    "ScheduledChunk",
    "Scheduler",
    "SchedulerOutput",
    "Sequence",
    "SequenceStatus",
]


class Scheduler(SequencePlacement):
    """Decides step by step; the caller carries the steps out or prices them."""

    def count_tokens(self, sequence: Sequence) -> int:
        """Count the tokens a sequence has, once the steps decided so far are done."""
        if sequence.status is SequenceStatus.DECODING:
            return sequence.decode_offset + self.decode_set.step_count
        return sequence.num_tokens

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; its forks begin when its prompt is computed."""
        block, size = self.config.block_size, self.block_pool.size
        if sequence.max_total_tokens - 1 > size * block:
            what = (
                f"{sequence.max_total_tokens - 1:,} tokens do not fit into {size:,} blocks of "
                f"{block}"
            )
            raise InputError([Problem("max_tokens", what, f"ask for {size * block:,} in all")])
        sequence.arrival_order, self._order = self._order, self._order + 1
        if sequence.priority:
            self._ranked = True
        self.waiting_queue.push(sequence)
        if self._blocked_head is not None and self.waiting_queue.peek() is not self._blocked_head:
            self._blocked_head = None

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None where there is nothing to do."""
        if self._finished or self.host_block_pool.pending_free:
            self._let_go()
        batch, waiting = SchedulerOutput(), self.waiting_queue
        if self._copies:
            batch.block_copies, self._copies = self._copies, []
        if (
            waiting.count
            and self._blocked_head is None
            and (self._separate_prefill or self._ranked)
        ):
            self._make_room(batch)
        alone = self._separate_prefill and bool(
            self._prefilling or (self._blocked_head is None and waiting.count)
        )
        if not alone:
            self._go_on(batch)
        budget = self.config.max_num_batched_tokens - batch.num_decodes
        if self._speculating and not alone:
            budget = self._schedule_drafts(batch, budget)
        for sequence in self._prefilling:
            budget -= self._compute(batch, sequence, budget) if budget > 0 else 0
        if self._blocked_head is None and waiting.count and not batch.preempted:
            self._admit(batch, budget)
        if not (batch.num_decodes or batch.chunks or batch.started_decoding or batch.preempted):
            self._copies = batch.block_copies
            return None
        if not alone and (finished := self.decode_set.advance(1)):
            self._finished += finished
            batch.finished += finished
        for sequence in batch.started_decoding:
            self._join(batch, sequence)
        return batch

    def count_decode_only_steps(self) -> int:
        """Return how many steps are certain to be nothing but decoding, the next one included."""
        if self._prefilling or self._speculating or self._copies:
            return 0
        if self._finished:
            self._let_go()
        if not self.decode_set.num_sequences or (
            self._blocked_head is None and self.waiting_queue.count
        ):
            return 0
        return self.decode_set.count_steps_until_change(self.block_pool.free_block_count)

    def schedule_decode_steps(self, count: int) -> list[Sequence]:
        """Decide `count` steps at once, at most `count_decode_only_steps`; return who finished."""
        decoding = self.decode_set
        self.block_pool.reserve(decoding.count_new_blocks(count))
        if self.waiting_queue.is_shared:
            self.waiting_queue.charge_tokens_each(decoding, count)
        if finished := decoding.advance(count):
            self._finished = finished
        return finished

    def allocate_blocks(self, batch: SchedulerOutput) -> list[tuple[Sequence, list[int]]]:
        """Draw the blocks that a step's sequences were promised; return those new to each.

        Only who reads blocks has to ask, before the next step is decided.
        """
        granted = []
        for sequence in batch.admitted:
            self._draw(sequence)
            granted.append((sequence, list(sequence.blocks)))
        granted += [(child, list(child.blocks)) for _, child in batch.forked]
        for sequence in batch.growing:
            missing = self.decode_set.count_blocks(sequence) - len(sequence.blocks)
            if missing:
                drawn = self.block_pool.allocate(missing)
                sequence.blocks += drawn
                granted.append((sequence, drawn))
        return granted

    def set_draft_token_count(self, sequence: Sequence, num_draft_tokens: int) -> None:
        """Set the number of draft tokens for the next step of a sequence."""
        sequence.num_draft_tokens = num_draft_tokens

    def accept_draft_tokens(self, sequence: Sequence, right: int) -> None:
        """Accept draft tokens: so many tokens and one more came with the last step."""
        if sequence.status is SequenceStatus.SPECULATING:
            sequence.num_tokens += right + 1
            sequence.num_computed_tokens, sequence.num_draft_tokens = sequence.num_tokens - 1, 0
            if sequence.num_tokens >= sequence.max_total_tokens:
                self._finished.append(sequence)

    def _let_go(self) -> None:
        due, self._finished = self._finished, []
        for sequence in due:
            self.finish(sequence)
        self.host_block_pool.begin_step()

    def _make_room(self, batch: SchedulerOutput) -> None:
        """Look whether there is room for whose turn it is; lower priorities go away for it."""
        head = self.waiting_queue.peek()
        assert head is not None, "somebody waits"
        # Reserve blocks for running decodes, so that the admitted request is not preempted at once.
        while not self._has_room(
            head,
            self.prefix_cache.find_longest_prefix(head),
            len(self.decode_set.get_block_starters()),
        ):
            if not self.running_set.has_lower_priority(head.priority):
                self._blocked_head = head
                return
            self._preempt(batch, self.running_set.select_victim())
        if batch.preempted:
            self._place(batch, self.waiting_queue.pop(head))

    def _go_on(self, batch: SchedulerOutput) -> None:
        """Promise a block to each decoding sequence that begins one, and let all of them go on."""
        decoding = self.decode_set
        bucket = decoding.get_block_starters()
        while len(bucket) > self.block_pool.free_block_count:
            self._preempt(batch, self.running_set.select_victim())
        if bucket:
            self.block_pool.reserve(len(bucket))
        batch.growing, batch.num_decodes, batch.attended_tokens = (
            bucket,
            decoding.num_sequences,
            decoding.attended_tokens,
        )
        if self.waiting_queue.is_shared:
            self.waiting_queue.charge_tokens_each(decoding, 1)

    def _schedule_drafts(self, batch: SchedulerOutput, budget: int) -> int:
        """Schedule sequences with draft tokens, as far as there is room."""
        for sequence in list(self._speculating):
            if sequence.status is not SequenceStatus.SPECULATING or budget <= 0:
                continue
            ahead = min(
                sequence.num_draft_tokens,
                budget - 1,
                sequence.max_total_tokens - sequence.num_tokens - 1,
            )
            reach = sequence.num_tokens + ahead
            held = len(sequence.blocks) + sequence.num_reserved_blocks
            missing = -(-reach // self.config.block_size) - held
            while (
                missing > self.block_pool.free_block_count
                and sequence.status is SequenceStatus.SPECULATING
            ):
                last = self.running_set.select_victim()
                if last in batch.admitted or any(chunk.sequence is last for chunk in batch.chunks):
                    break
                self._preempt(batch, last)
            if (
                missing > self.block_pool.free_block_count
                or sequence.status is not SequenceStatus.SPECULATING
            ):
                continue
            if missing > 0:
                self.block_pool.reserve(missing)
                sequence.num_reserved_blocks += missing
                batch.admitted.append(sequence)
            batch.chunks.append(
                ScheduledChunk(sequence, sequence.num_computed_tokens, reach, samples_token=True)
            )
            budget -= ahead + 1
        return budget

    def _admit(self, batch: SchedulerOutput, budget: int) -> None:
        """Let those in whose turn it is, as long as there is room."""
        waiting, block = self.waiting_queue, self.config.block_size
        while budget > 0 and (sequence := waiting.peek()) is not None:
            found = self.prefix_cache.find_longest_prefix(sequence) if sequence.block_hashes else []
            if not self._has_room(sequence, found):
                self._blocked_head = sequence
                return
            if (
                self._separate_prefill
                and batch.chunks
                and sequence.num_tokens - len(found) * block > budget
            ):
                return
            self._place(batch, waiting.pop(sequence), found)
            if sequence.status is SequenceStatus.PREFILLING:
                budget -= self._compute(batch, sequence, budget)

    def _compute(self, batch: SchedulerOutput, sequence: Sequence, budget: int) -> int:
        """Let a step compute some tokens of a prompt; return how many."""
        start, most = sequence.num_computed_tokens, self.config.long_prefill_token_threshold
        left = sequence.num_tokens - start
        count = left if left < budget else budget
        if most is not None and most < count:
            count = most
        stop = sequence.num_computed_tokens = start + count
        batch.chunks.append(ScheduledChunk(sequence, start, stop, count == left))
        if self.waiting_queue.is_shared:
            self.waiting_queue.charge_tokens(sequence.tenant, count)
        if sequence.block_hashes:
            self.prefix_cache.cache_full_blocks(sequence)
        if count == left:
            batch.started_decoding.append(sequence)
        return count

    def _join(self, batch: SchedulerOutput, sequence: Sequence) -> None:
        """Let a sequence whose known tokens are computed go on token by token."""
        if sequence in self._prefilling:
            del self._prefilling[sequence]
            sequence.num_tokens += 1
            if sequence.forks:
                self._fork(batch, sequence)
        if sequence.num_tokens >= sequence.max_total_tokens:
            self._finished.append(sequence)
            batch.finished.append(sequence)
        elif self._speculative:
            sequence.status = SequenceStatus.SPECULATING
            self._speculating[sequence] = None
        else:
            self.decode_set.add(sequence)

    def _fork(self, batch: SchedulerOutput, sequence: Sequence) -> None:
        """Let others go on from the end of a prompt: all but its last block is shared."""
        whole, rest = divmod(sequence.num_computed_tokens, self.config.block_size)
        forks, sequence.forks = sequence.forks, ()
        for child in forks:
            if child.status is SequenceStatus.FINISHED:
                continue
            child.arrival_order, self._order = self._order, self._order + 1
            if (
                len(self.running_set) >= self.config.max_num_seqs
                or self.block_pool.free_block_count < 1
            ):
                self.waiting_queue.push(child, first=True)
                continue
            child.blocks = sequence.blocks[:whole]
            self.block_pool.touch(child.blocks)
            if rest:
                self.block_pool.reserve(1)
                child.blocks += self.block_pool.allocate(1)
                self._copies.append((sequence.blocks[whole], child.blocks[-1]))
            child.num_tokens, child.num_cached_blocks = sequence.num_tokens, whole
            child.num_computed_tokens = child.num_cached_tokens = sequence.num_computed_tokens
            self.running_set.add(child)
            batch.forked.append((sequence, child))
            self._join(batch, child)
