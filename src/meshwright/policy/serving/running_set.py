"""`DecodeSet`: sequences that get one token with every step, none of which is touched for it.

Each keeps how many tokens it is ahead of the steps, so that a step moves all of them on at once.
One bucket for each place in a block says who begins a new block when, and a heap who ends when.
Many steps are taken as quickly as one.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from meshwright.policy.serving.sequence import Sequence, SequenceStatus


class DecodeSet:
    """Sequences in step with each other."""

    __slots__ = (
        "_block",
        "_buckets",
        "_ends",
        "_members",
        "_sizes",
        "_tickets",
        "attended_tokens",
        "num_sequences",
        "step_count",
    )

    def __init__(self, block_tokens: int) -> None:
        self.step_count = self.num_sequences = 0
        """Steps so far, and how many there are."""
        self.attended_tokens = 0
        """Keys that all of them look at in the next step."""
        self._block = block_tokens
        self._members: dict[Sequence, None] = {}
        self._buckets: list[dict[Sequence, None]] = [{} for _ in range(block_tokens)]
        self._sizes = [0] * block_tokens
        self._tickets = 0
        self._ends: list[tuple[int, int, Sequence]] = []
        """When each has all its tokens, the first on top; some of them have left since."""

    def __len__(self) -> int:
        return self.num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def get_block_starters(self) -> dict[Sequence, None]:
        """Return those that begin a new block in the next step."""
        return self._buckets[self.step_count % self._block]

    def count_new_blocks(self, steps: int) -> int:
        """Count the blocks that so many steps begin."""
        block, sizes = self._block, self._sizes
        first = self.step_count % block
        stop = first + steps % block
        begun = steps // block * self.num_sequences + sum(sizes[first:stop])
        return begun + sum(sizes[: stop - block]) if stop > block else begun

    def count_steps_until_change(self, spare: int) -> int:
        """Return how many steps go by until somebody ends or `spare` blocks are used up."""
        ends = self._ends
        end, ticket, sequence = ends[0]
        while ticket != sequence.decode_epoch:
            heappop(ends)
            end, ticket, sequence = ends[0]
        steps, count = end - self.step_count, self.num_sequences
        if count * -(-steps // self._block) <= spare:
            return steps
        cycles, left = divmod(spare, count)
        for offset in range(self._block):
            left -= self._sizes[(self.step_count + offset) % self._block]
            if left < 0:
                return min(steps, cycles * self._block + offset)
        raise AssertionError("a cycle takes a block for each")

    def add(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on."""
        tokens = sequence.num_tokens
        lead = sequence.decode_offset = tokens - self.step_count
        place = (1 - lead) % self._block
        sequence.status = SequenceStatus.DECODING
        self._members[sequence] = None
        self.num_sequences += 1
        self.attended_tokens += tokens
        self._buckets[place][sequence] = None
        self._sizes[place] += 1
        sequence.decode_epoch = self._tickets = ticket = self._tickets + 1
        heappush(self._ends, (sequence.max_total_tokens - lead, ticket, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, and write down how far it came."""
        lead = sequence.decode_offset
        place = (1 - lead) % self._block
        sequence.num_reserved_blocks = self.count_blocks(sequence) - len(sequence.blocks)
        sequence.num_tokens = tokens = lead + self.step_count
        sequence.num_computed_tokens = tokens - 1
        sequence.decode_epoch = 0
        del self._members[sequence]
        self.num_sequences -= 1
        self.attended_tokens -= tokens
        del self._buckets[place][sequence]
        self._sizes[place] -= 1

    def count_blocks(self, sequence: Sequence) -> int:
        """Count the blocks that a member holds or is promised."""
        return -(-(sequence.decode_offset + self.step_count - 1) // self._block)

    def advance(self, count: int) -> list[Sequence]:
        """Take so many steps; return those that have all their tokens now."""
        self.step_count = steps = self.step_count + count
        self.attended_tokens += count * self.num_sequences
        ends, found = self._ends, []
        while ends and ends[0][0] <= steps:
            _, ticket, sequence = heappop(ends)
            if ticket == sequence.decode_epoch:
                found.append(sequence)
        return found


class RunningSet(dict[Sequence, None]):
    """Sequences in the order they came in: a dictionary, so that looking costs no call."""

    __slots__ = ("_ranks",)

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[int, int] = {}
        """How many of them have which priority, but for those that have none."""

    def add(self, sequence: Sequence) -> None:
        """Give a sequence a place."""
        self[sequence] = None
        if rank := sequence.priority:
            self._ranks[rank] = self._ranks.get(rank, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        """Take its place away."""
        del self[sequence]
        if rank := sequence.priority:
            self._ranks[rank] -= 1
            if not self._ranks[rank]:
                del self._ranks[rank]

    def has_lower_priority(self, priority: int) -> bool:
        """Tell whether one of them has a lower priority."""
        if priority > 0 and sum(self._ranks.values()) < len(self):
            return True
        return any(rank < priority for rank in self._ranks)

    def select_victim(self) -> Sequence:
        """Return who makes room: of those with the lowest priority, who came in last."""
        if not self._ranks or len(self) in self._ranks.values():
            return next(reversed(self))
        return min(reversed(self), key=lambda each: each.priority)
