"""`Batcher`: which tokens of which requests one step computes. It knows no clock and no device.

Every step serves all sequences that decode, then parts of prompts as far as the step has room
(Sarathi-Serve, arXiv 2403.02310), then those whose turn it is. Blocks of a whole prompt are
promised when it is admitted; a sequence that decodes gets a further one when it needs it. Where
none is left, the one that came last with the lowest priority makes room.

A step is decided before the one before it is done: a sequence that may go on counts as going on,
and `end` takes it out when its end is seen. So a device never waits for a decision. `leap` decides
many steps at once in which there is nothing but decoding, exactly as `next` would one by one.
"""

from collections.abc import Mapping

from meshwright.errors import InputError, Problem
from meshwright.policy.decoding import Decoding
from meshwright.policy.host_blocks import HostBlocks
from meshwright.policy.kv import BlockPool
from meshwright.policy.places import Places
from meshwright.policy.prefix_cache import PrefixCache
from meshwright.policy.sequences import Batch, Chunk, Move, Sequence, State
from meshwright.policy.waiting import Waiting
from meshwright.spec.serving import Limits

__all__ = ["Batch", "Batcher", "Chunk", "Move", "Sequence", "State"]


class Batcher:
    """Decides step by step; the caller carries the steps out or prices them."""

    def __init__(
        self,
        limits: Limits,
        blocks: int,
        *,
        shares: Mapping[str, float] | None = None,
        guesses: bool = False,
    ) -> None:
        """Share out `blocks` blocks; `shares` are tenants' weights, where these are not equal.

        With `guesses`, sequences do not decode by themselves: each `propose`s tokens for its next
        step, and `settle`s how many of them were right.
        """
        self.limits, self.pool = limits, BlockPool(blocks)
        self.host = HostBlocks(limits.host_blocks)
        self.waiting: Waiting[Sequence] = Waiting(shares)
        self.decoding = Decoding(limits.block_tokens)
        self.preemptions = 0
        """How often a sequence made room."""
        self.cache = PrefixCache(self.pool, limits.block_tokens, is_on=limits.prefix_cache)
        self._guesses = guesses
        self.places = Places()
        self._ranked = False
        """Whether there has been more than one priority."""
        self._prefilling: dict[Sequence, None] = {}
        self._guessing: dict[Sequence, None] = {}
        self._due: list[Sequence] = []
        """Those that have all their tokens: let go when the next step is decided."""
        self._copies: list[tuple[int, int]] = []
        self._stuck: Sequence | None = None
        """Whose turn it is, where there was no room for it and none has been made since."""
        self._order = 0
        self._kept_free = int(limits.watermark * blocks)
        self._apart = limits.mixing == "apart"

    @property
    def running(self) -> int:
        """Sequences that have a place."""
        return len(self.places)

    def tokens_of(self, sequence: Sequence) -> int:
        """Count the tokens a sequence has, once the steps decided so far are done."""
        if sequence.state is State.DECODING:
            return sequence.lead + self.decoding.steps
        return sequence.tokens

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; its forks begin when its prompt is computed."""
        block, size = self.limits.block_tokens, self.pool.size
        if sequence.end - 1 > size * block:
            what = f"{sequence.end - 1:,} tokens do not fit into {size:,} blocks of {block}"
            raise InputError([Problem("max_tokens", what, f"ask for {size * block:,} in all")])
        sequence.order, self._order = self._order, self._order + 1
        if sequence.priority:
            self._ranked = True
        self.waiting.push(sequence)
        if self._stuck is not None and self.waiting.peek() is not self._stuck:
            self._stuck = None

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it has met its end, or nobody waits for it."""
        state, sequence.state = sequence.state, State.OVER
        if sequence in self.places:
            self._leave(sequence)
        elif state is State.WAITING and sequence.order >= 0:
            self.waiting.remove(sequence)
            self.host.release(sequence.away)
            self._stuck = None

    def reserve(self, blocks: int, *, all_there_are: bool = False) -> bool:
        """Keep blocks for keys and values on their way; tell whether there are as many.

        The watermark is left for those who run, unless `all_there_are` may be had.
        """
        left = self._kept_free if self.places and not all_there_are else 0
        if blocks + left > self.pool.spare:
            return False
        self.pool.promise(blocks)
        return True

    def free(self, blocks: int) -> None:
        """Give back blocks that were reserved."""
        self.pool.forgo(blocks)
        self._stuck = None

    def next(self) -> Batch | None:
        """Decide the next step; None where there is nothing to do."""
        if self._due or self.host.read:
            self._let_go()
        batch, waiting = Batch(), self.waiting
        if self._copies:
            batch.copies, self._copies = self._copies, []
        if waiting.count and self._stuck is None and (self._apart or self._ranked):
            self._make_room(batch)
        alone = self._apart and bool(self._prefilling or (self._stuck is None and waiting.count))
        if not alone:
            self._go_on(batch)
        budget = self.limits.batch_tokens - batch.decodes
        if self._guessing and not alone:
            budget = self._check_guesses(batch, budget)
        for sequence in self._prefilling:
            budget -= self._compute(batch, sequence, budget) if budget > 0 else 0
        if self._stuck is None and waiting.count and not batch.preempted:
            self._admit(batch, budget)
        if not (batch.decodes or batch.chunks or batch.joined or batch.preempted):
            self._copies = batch.copies
            return None
        if not alone and (finished := self.decoding.go(1)):
            self._due += finished
            batch.finished += finished
        for sequence in batch.joined:
            self._join(batch, sequence)
        return batch

    def horizon(self) -> int:
        """Return how many steps are certain to be nothing but decoding, the next one included."""
        if self._prefilling or self._guessing or self._copies:
            return 0
        if self._due:
            self._let_go()
        if not self.decoding.count or (self._stuck is None and self.waiting.count):
            return 0
        return self.decoding.certain(self.pool.spare)

    def leap(self, count: int) -> list[Sequence]:
        """Decide `count` steps at once, at most as many as `horizon` says; return who finished."""
        decoding = self.decoding
        self.pool.promise(decoding.growth(count))
        if self.waiting.is_shared:
            self.waiting.charge_each(decoding, count)
        if finished := decoding.go(count):
            self._due = finished
        return finished

    def grants(self, batch: Batch) -> list[tuple[Sequence, list[int]]]:
        """Draw the blocks that a step's sequences were promised; return those new to each.

        Only who reads blocks has to ask, before the next step is decided.
        """
        granted = []
        for sequence in batch.placed:
            self._draw(sequence)
            granted.append((sequence, list(sequence.blocks)))
        granted += [(child, list(child.blocks)) for _, child in batch.forked]
        for sequence in batch.grown:
            missing = self.decoding.held(sequence) - len(sequence.blocks)
            if missing:
                drawn = self.pool.draw(missing)
                sequence.blocks += drawn
                granted.append((sequence, drawn))
        return granted

    def propose(self, sequence: Sequence, guesses: int) -> None:
        """Say how many tokens are guessed ahead for the next step of a sequence."""
        sequence.guesses = guesses

    def settle(self, sequence: Sequence, right: int) -> None:
        """Say how many guesses were right: so many tokens and one more came with the last step."""
        if sequence.state is State.GUESSING:
            sequence.tokens += right + 1
            sequence.done, sequence.guesses = sequence.tokens - 1, 0
            if sequence.tokens >= sequence.end:
                self._due.append(sequence)

    # One step, part by part.

    def _let_go(self) -> None:
        due, self._due = self._due, []
        for sequence in due:
            self.end(sequence)
        self.host.settle()

    def _make_room(self, batch: Batch) -> None:
        """Look whether there is room for whose turn it is; lower priorities go away for it."""
        head = self.waiting.peek()
        assert head is not None, "somebody waits"
        # Who decodes beside it begins blocks, too, and must not send it away for them at once.
        while not self._has_room(head, self.cache.find(head), len(self.decoding.bucket())):
            if not self.places.has_below(head.priority):
                self._stuck = head
                return
            self._preempt(batch, self.places.last())
        if batch.preempted:
            self._place(batch, self.waiting.pop(head))

    def _go_on(self, batch: Batch) -> None:
        """Promise a block to each decoding sequence that begins one, and let all of them go on."""
        decoding = self.decoding
        bucket = decoding.bucket()
        while len(bucket) > self.pool.spare:
            self._preempt(batch, self.places.last())
        if bucket:
            self.pool.promise(len(bucket))
        batch.grown, batch.decodes, batch.context = bucket, decoding.count, decoding.context
        if self.waiting.is_shared:
            self.waiting.charge_each(decoding, 1)

    def _check_guesses(self, batch: Batch, budget: int) -> int:
        """Let sequences that guess check what they guessed, as far as there is room."""
        for sequence in list(self._guessing):
            if sequence.state is not State.GUESSING or budget <= 0:
                continue
            ahead = min(sequence.guesses, budget - 1, sequence.end - sequence.tokens - 1)
            reach = sequence.tokens + ahead
            held = len(sequence.blocks) + sequence.promised
            missing = -(-reach // self.limits.block_tokens) - held
            while missing > self.pool.spare and sequence.state is State.GUESSING:
                last = self.places.last()
                if last in batch.placed or any(chunk.sequence is last for chunk in batch.chunks):
                    break
                self._preempt(batch, last)
            if missing > self.pool.spare or sequence.state is not State.GUESSING:
                continue
            if missing > 0:
                self.pool.promise(missing)
                sequence.promised += missing
                batch.placed.append(sequence)
            batch.chunks.append(Chunk(sequence, sequence.done, reach, samples=True))
            budget -= ahead + 1
        return budget

    def _admit(self, batch: Batch, budget: int) -> None:
        """Let those in whose turn it is, as long as there is room."""
        waiting, block = self.waiting, self.limits.block_tokens
        while budget > 0 and (sequence := waiting.peek()) is not None:
            found = self.cache.find(sequence) if sequence.keys else []
            if not self._has_room(sequence, found):
                self._stuck = sequence
                return
            if self._apart and batch.chunks and sequence.tokens - len(found) * block > budget:
                return
            self._place(batch, waiting.pop(sequence), found)
            if sequence.state is State.PREFILLING:
                budget -= self._compute(batch, sequence, budget)

    def _has_room(self, sequence: Sequence, found: list[int], beside: int = 0) -> bool:
        if len(self.places) >= self.limits.batch_requests:
            return False
        needed = -(-sequence.tokens // self.limits.block_tokens) - len(found)
        if found:
            needed += self.pool.idle_among(found)
        return needed + beside + (self._kept_free if self.places else 0) <= self.pool.spare

    def _place(self, batch: Batch, sequence: Sequence, found: list[int] | None = None) -> None:
        """Give a sequence its place and its blocks."""
        found = self.cache.find(sequence) if found is None else found
        self.places.enter(sequence)
        if found:
            self.pool.hold(found)
        if not sequence.done:
            self.cache.use(sequence, len(found))
        done, tokens = sequence.done, sequence.tokens
        # It may come with all its keys and values, and with a token that follows them.
        decodes = done >= tokens - (tokens > sequence.prompt)
        sequence.blocks, sequence.named = found, len(found)
        missing = -(-(done if decodes else tokens) // self.limits.block_tokens) - len(found)
        sequence.promised = missing
        self.pool.promise(missing)
        batch.placed.append(sequence)
        if sequence.keys or sequence.forks or sequence.away:
            self._draw(sequence)
            if held := sequence.away:
                sequence.away = []
                batch.moved_in.append(Move(sequence, sequence.blocks[: len(held)], held))
                self.host.leave(held)
        if decodes:
            sequence.tokens = done + 1
            batch.joined.append(sequence)
        else:
            sequence.state = State.PREFILLING
            self._prefilling[sequence] = None

    def _compute(self, batch: Batch, sequence: Sequence, budget: int) -> int:
        """Let a step compute some tokens of a prompt; return how many."""
        start, most = sequence.done, self.limits.chunk_tokens
        left = sequence.tokens - start
        count = left if left < budget else budget
        if most is not None and most < count:
            count = most
        stop = sequence.done = start + count
        batch.chunks.append(Chunk(sequence, start, stop, count == left))
        if self.waiting.is_shared:
            self.waiting.charge(sequence.tenant, count)
        if sequence.keys:
            self.cache.name(sequence)
        if count == left:
            batch.joined.append(sequence)
        return count

    def _join(self, batch: Batch, sequence: Sequence) -> None:
        """Let a sequence whose known tokens are computed go on token by token."""
        if sequence in self._prefilling:
            del self._prefilling[sequence]
            sequence.tokens += 1
            if sequence.forks:
                self._fork(batch, sequence)
        if sequence.tokens >= sequence.end:
            self._due.append(sequence)
            batch.finished.append(sequence)
        elif self._guesses:
            sequence.state = State.GUESSING
            self._guessing[sequence] = None
        else:
            self.decoding.join(sequence)

    def _fork(self, batch: Batch, sequence: Sequence) -> None:
        """Let others go on from the end of a prompt: all but its last block is shared."""
        whole, rest = divmod(sequence.done, self.limits.block_tokens)
        forks, sequence.forks = sequence.forks, ()
        for child in forks:
            if child.state is State.OVER:
                continue
            child.order, self._order = self._order, self._order + 1
            if len(self.places) >= self.limits.batch_requests or self.pool.spare < 1:
                self.waiting.push(child, first=True)
                continue
            child.blocks = sequence.blocks[:whole]
            self.pool.hold(child.blocks)
            if rest:
                self.pool.promise(1)
                child.blocks += self.pool.draw(1)
                self._copies.append((sequence.blocks[whole], child.blocks[-1]))
            child.tokens, child.named = sequence.tokens, whole
            child.done = child.cached = sequence.done
            self.places.enter(child)
            batch.forked.append((sequence, child))
            self._join(batch, child)

    # Leaving.

    def _preempt(self, batch: Batch, sequence: Sequence) -> None:
        """Let a sequence make room: it waits again, at the head of its line."""
        self.preemptions += 1
        batch.preempted.append(sequence)
        if sequence.ticket:
            self.decoding.leave(sequence)
        # Not those of tokens still to be computed, or that were guessed wrong.
        kept = -(-sequence.done // self.limits.block_tokens)
        if self.limits.preemption == "swap" and (away := self.host.take(kept)):
            self._draw(sequence)
            sequence.away = away
            batch.moved_out.append(Move(sequence, sequence.blocks[:kept], sequence.away))
            self._leave(sequence)
        else:
            self._leave(sequence)
            sequence.done = 0
        sequence.state, sequence.guesses = State.WAITING, 0
        self.waiting.push(sequence, first=True)

    def _leave(self, sequence: Sequence) -> None:
        """Take away a place and its blocks."""
        if sequence.ticket:
            self.decoding.leave(sequence)
        else:
            self._prefilling.pop(sequence, None)
            self._guessing.pop(sequence, None)
        self.places.leave(sequence)
        if sequence.keys:
            self.cache.name(sequence)
        if sequence.blocks:
            self.pool.release(sequence.blocks)
            sequence.blocks = []
        self.pool.forgo(sequence.promised)
        sequence.promised = sequence.named = 0
        self._stuck = None

    def _draw(self, sequence: Sequence) -> None:
        if sequence.promised:
            sequence.blocks = sequence.blocks + self.pool.draw(sequence.promised)
            sequence.promised = 0
