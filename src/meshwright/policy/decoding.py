"""`Decoding`: sequences that get one token with every step, none of which is touched for it.

Each keeps how many tokens it is ahead of the steps, so that a step moves all of them on at once.
One bucket for each place in a block says who begins a new block when, and a heap who ends when.
Many steps are taken as quickly as one.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from meshwright.policy.sequences import Sequence, State


class Decoding:
    """Sequences in step with each other."""

    __slots__ = (
        "_block", "_buckets", "_ends", "_members", "_sizes", "_tickets", "context", "count",
        "steps",
    )  # fmt: skip

    def __init__(self, block_tokens: int) -> None:
        self.steps = self.count = 0
        """Steps so far, and how many there are."""
        self.context = 0
        """Keys that all of them look at in the next step."""
        self._block = block_tokens
        self._members: dict[Sequence, None] = {}
        self._buckets: list[dict[Sequence, None]] = [{} for _ in range(block_tokens)]
        self._sizes = [0] * block_tokens
        self._tickets = 0
        self._ends: list[tuple[int, int, Sequence]] = []
        """When each has all its tokens, the first on top; some of them have left since."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def bucket(self) -> dict[Sequence, None]:
        """Return those that begin a new block in the next step."""
        return self._buckets[self.steps % self._block]

    def growth(self, steps: int) -> int:
        """Count the blocks that so many steps begin."""
        block, sizes = self._block, self._sizes
        first = self.steps % block
        stop = first + steps % block
        begun = steps // block * self.count + sum(sizes[first:stop])
        return begun + sum(sizes[: stop - block]) if stop > block else begun

    def certain(self, spare: int) -> int:
        """Return how many steps go by until somebody ends or `spare` blocks are used up."""
        ends = self._ends
        end, ticket, sequence = ends[0]
        while ticket != sequence.ticket:
            heappop(ends)
            end, ticket, sequence = ends[0]
        steps, count = end - self.steps, self.count
        if count * -(-steps // self._block) <= spare:
            return steps
        cycles, left = divmod(spare, count)
        for offset in range(self._block):
            left -= self._sizes[(self.steps + offset) % self._block]
            if left < 0:
                return min(steps, cycles * self._block + offset)
        raise AssertionError("a cycle takes a block for each")

    def join(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on."""
        tokens = sequence.tokens
        lead = sequence.lead = tokens - self.steps
        place = (1 - lead) % self._block
        sequence.state = State.DECODING
        self._members[sequence] = None
        self.count += 1
        self.context += tokens
        self._buckets[place][sequence] = None
        self._sizes[place] += 1
        sequence.ticket = self._tickets = ticket = self._tickets + 1
        heappush(self._ends, (sequence.end - lead, ticket, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out, and write down how far it came."""
        lead = sequence.lead
        place = (1 - lead) % self._block
        sequence.promised = self.held(sequence) - len(sequence.blocks)
        sequence.tokens = tokens = lead + self.steps
        sequence.done = tokens - 1
        sequence.ticket = 0
        del self._members[sequence]
        self.count -= 1
        self.context -= tokens
        del self._buckets[place][sequence]
        self._sizes[place] -= 1

    def held(self, sequence: Sequence) -> int:
        """Count the blocks that a member holds or is promised."""
        return -(-(sequence.lead + self.steps - 1) // self._block)

    def go(self, count: int) -> list[Sequence]:
        """Take so many steps; return those that have all their tokens now."""
        self.steps = steps = self.steps + count
        self.context += count * self.count
        ends, found = self._ends, []
        while ends and ends[0][0] <= steps:
            _, ticket, sequence = heappop(ends)
            if ticket == sequence.ticket:
                found.append(sequence)
        return found
