"""`Router`: which of several engines gets a request. It knows no clock and asks no engine.

It counts what it sent and what came back, which is all that a proxy in front of engines sees. One
that minds prefixes also remembers which blocks of prompts it sent where, the latest of them, and
weighs what an engine would still have to compute against what it has open already.
"""

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from typing import Literal, get_args

from meshwright.errors import InputError, Problem
from meshwright.policy.recent import Recent
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
        self._block = block_tokens
        self._sent = [Recent(kept_blocks) for _ in range(engines)]
        """Blocks sent to each."""

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
            chosen = min([(self.open[one], self.tokens[one], one) for one in there])[2]
        else:
            chosen = self._nearest(prompt_tokens, keys, there)
        if keys and self.how == "prefix":
            self._sent[chosen].use(keys)
        self.open[chosen] += 1
        self.tokens[chosen] += prompt_tokens
        return chosen

    def back(self, engine: int, prompt_tokens: int) -> None:
        """Say that a request has come back from its engine, done or not."""
        self.open[engine] -= 1
        self.tokens[engine] -= prompt_tokens

    def _nearest(self, prompt_tokens: int, keys: Sequence[Hashable], there: Sequence[int]) -> int:
        """Return who has least to do: what it has open, and what it lacks of this prompt."""
        found, block = self._matched(keys), self._block
        # Of those with equally little to do, the one whose cache has most room.
        work = [
            (
                self.tokens[one] + max(0, prompt_tokens - found[one] * block),
                self.open[one],
                len(self._sent[one]),
                one,
            )
            for one in there
        ]
        return min(work)[3]

    def _matched(self, keys: Sequence[Hashable]) -> list[int]:
        """Count the leading blocks that each engine was sent."""
        return [
            # Where one is remembered, all before it are.
            bisect_left(keys, True, key=lambda key: key not in sent) if keys[0] in sent else 0
            for sent in self._sent
        ]
