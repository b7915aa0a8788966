"""`Router`: which of several engines gets a request. It knows no clock and asks no engine.

It counts what it sent and what came back, which is all that a proxy in front of engines sees. One
that minds prefixes also remembers which blocks of prompts it sent where, the latest of them, and
weighs what an engine would still have to compute against what it has open already.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Literal, get_args

from meshwright.errors import InputError, Problem
from meshwright.spec.names import unknown_name

Routing = Literal["round-robin", "least-loaded", "prefix"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)


class Router:
    """Requests on their way to engines, numbered from 0."""

    def __init__(
        self,
        engines: int,
        how: Routing = "least-loaded",
        *,
        block_tokens: int = 16,
        kept_blocks: int = 1 << 20,
    ) -> None:
        """Route to `engines`; `kept_blocks` of each are remembered, where prefixes count."""
        if how not in ROUTINGS:
            raise InputError([unknown_name("routing", str(how), list(ROUTINGS), "routing")])
        if engines < 1:
            raise InputError([Problem("engines", f"{engines} are none", "use 1 or more")])
        self.how = how
        self.open = [0] * engines
        """Requests of each engine that have not come back."""
        self.tokens = [0] * engines
        """Tokens of their prompts."""
        self._turn = -1
        self._block, self._most = block_tokens, kept_blocks
        self._sent: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(engines)]
        """Blocks sent to each, the latest last."""
        self._holders: dict[Hashable, int] = {}
        """Engines that were sent a block, one bit for each."""

    def send(
        self,
        prompt_tokens: int,
        keys: Sequence[Hashable] | None = None,
        *,
        away: Collection[int] = (),
    ) -> int:
        """Choose the engine of a request, none of those that are `away`, and count it there."""
        there: Sequence[int] = range(len(self.open))
        if away:
            there = [engine for engine in there if engine not in away]
        if self.how == "round-robin":
            after = [engine for engine in there if engine > self._turn]
            self._turn = chosen = (after or there)[0]
        elif self.how == "least-loaded" or not keys:
            chosen = min(there, key=self._load)
        else:
            chosen = self._nearest(prompt_tokens, keys, there)
        if keys and self.how == "prefix":
            self._remember(chosen, keys)
        self.open[chosen] += 1
        self.tokens[chosen] += prompt_tokens
        return chosen

    def back(self, engine: int, prompt_tokens: int) -> None:
        """Say that a request has come back from its engine, done or not."""
        self.open[engine] -= 1
        self.tokens[engine] -= prompt_tokens

    def _load(self, engine: int) -> tuple[int, int]:
        return self.open[engine], self.tokens[engine]

    def _nearest(self, prompt_tokens: int, keys: Sequence[Hashable], there: Sequence[int]) -> int:
        """Return who has least to do: what it has open, and what it lacks of this prompt."""
        found = self._matched(keys)

        def work(engine: int) -> tuple[int, int, int]:
            lacking = prompt_tokens - min(prompt_tokens, found[engine] * self._block)
            # Of those with equally little to do, the one whose cache has most room.
            return self.tokens[engine] + lacking, self.open[engine], len(self._sent[engine])

        return min(there, key=work)

    def _matched(self, keys: Sequence[Hashable]) -> list[int]:
        """Count the leading blocks that each engine was sent."""
        found, holders = [0] * len(self.open), self._holders
        still = (1 << len(self.open)) - 1
        for depth, key in enumerate(keys):
            left = still & ~holders.get(key, 0)
            while left:
                lowest = left & -left
                found[lowest.bit_length() - 1] = depth
                left -= lowest
            still &= holders.get(key, 0)
            if not still:
                return found
        while still:
            lowest = still & -still
            found[lowest.bit_length() - 1] = len(keys)
            still -= lowest
        return found

    def _remember(self, engine: int, keys: Sequence[Hashable]) -> None:
        sent, holders, bit = self._sent[engine], self._holders, 1 << engine
        # The end of a prompt is forgotten first: its beginning is of more use.
        for key in reversed(keys):
            if key in sent:
                sent.move_to_end(key)
            else:
                sent[key] = None
                holders[key] = holders.get(key, 0) | bit
        while len(sent) > self._most:
            oldest, _ = sent.popitem(last=False)
            holders[oldest] &= ~bit
            if not holders[oldest]:
                del holders[oldest]
