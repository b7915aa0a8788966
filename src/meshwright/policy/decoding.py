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
        "_block", "_buckets", "_ends", "_lead", "_members", "_sizes", "_tickets", "count", "steps",
    )  # fmt: skip

    def __init__(self, block_tokens: int) -> None:
        self.steps = self.count = 0
        """Steps so far, and how many there are."""
        self._block = block_tokens
        self._members: dict[Sequence, None] = {}
        self._buckets: list[dict[Sequence, None]] = [{} for _ in range(block_tokens)]
        self._sizes = [0] * block_tokens
        self._lead = 0
        """Tokens that all of them together are ahead of the steps."""
        self._tickets = 0
        self._ends: list[tuple[int, int, Sequence]] = []
        """When each has all its tokens, the first on top; some of them have left since."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    @property
    def context(self) -> int:
        """Keys that all of them look at in the next step."""
        return self._lead + self.count * self.steps

    def bucket(self) -> dict[Sequence, None]:
        """Return those that begin a new block in the next step."""
        return self._buckets[self.steps % self._block]

    def growth(self, steps: int) -> int:
        """Count the blocks that so many steps begin."""
        cycles, rest = divmod(steps, self._block)
        first = self.steps % self._block
        begun = cycles * self.count + sum(self._sizes[first : first + rest])
        over = first + rest - self._block
        return begun + sum(self._sizes[:over]) if over > 0 else begun

    def certain(self, spare: int) -> int:
        """Return how many steps go by until somebody ends or `spare` blocks are used up."""
        ends = self._ends
        while ends[0][1] != ends[0][2].ticket:
            heappop(ends)
        steps, count = ends[0][0] - self.steps, self.count
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
        lead = sequence.lead = sequence.tokens - self.steps
        place = (1 - lead) % self._block
        sequence.state = State.DECODING
        self._members[sequence] = None
        self.count += 1
        self._buckets[place][sequence] = None
        self._sizes[place] += 1
        self._lead += lead
        self._tickets += 1
        sequence.ticket = self._tickets
        heappush(self._ends, (sequence.end - lead, self._tickets, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out, and write down how far it came."""
        lead = sequence.lead
        place = (1 - lead) % self._block
        del self._members[sequence]
        self.count -= 1
        sequence.ticket = 0
        del self._buckets[place][sequence]
        self._sizes[place] -= 1
        self._lead -= lead
        sequence.tokens = lead + self.steps
        sequence.done = sequence.tokens - 1
        sequence.promised = self.held(sequence) - len(sequence.blocks)

    def held(self, sequence: Sequence) -> int:
        """Count the blocks that a member holds or is promised."""
        return -(-(sequence.lead + self.steps - 1) // self._block)

    def finished(self) -> list[Sequence]:
        """Return those that have all their tokens since it was asked last."""
        ends, steps, found = self._ends, self.steps, []
        while ends and ends[0][0] <= steps:
            _, ticket, sequence = heappop(ends)
            if ticket == sequence.ticket:
                found.append(sequence)
        return found
