"""`RequestRouter`: which engine replica gets a request, by load or by shared prefix."""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import Literal, get_args

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import build_unknown_name_problem


class PrefixIndex(dict[Hashable, int]):
    """Keys, each of which tells all before it, with the turn in which each was used last.

    Those used longest ago are forgotten, of one prompt its end first. So where a key is remembered,
    all before it are.
    """

    __slots__ = ("_listed", "_lists", "_most", "_turn")

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._turn = most, 0
        self._lists: deque[tuple[int, list[Hashable]]] = deque()
        """What each turn used; some of it has been used again since."""
        self._listed = 0
        """Keys in all of these lists."""

    def touch(self, keys: Sequence[Hashable]) -> None:
        """Remember the keys of a prompt as the latest."""
        self._turn = turn = self._turn + 1
        self.update(dict.fromkeys(keys, turn))
        self._lists.append((turn, list(keys)))
        self._listed += len(keys)
        while len(self) > self._most:
            self._forget()
        if self._listed > 2 * len(self):
            self._tidy()

    def _forget(self) -> None:
        """Forget from the oldest list what is too much, or the list."""
        turn, keys = self._lists[0]
        before, much = len(keys), len(self) - self._most
        while keys and much:
            key = keys.pop()
            if self[key] == turn:
                del self[key]
                much -= 1
        self._listed -= before - len(keys)
        if not keys:
            self._lists.popleft()

    def _tidy(self) -> None:
        """Leave each key in the list of its last use alone."""
        left = ((turn, [key for key in keys if self[key] == turn]) for turn, keys in self._lists)
        self._lists = deque(one for one in left if one[1])
        self._listed = len(self)


RoutingPolicy = Literal["round-robin", "least-loaded", "prefix"]

ROUTING_POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)


class RequestRouter:
    """Requests on their way to engines, numbered from 0."""

    def __init__(
        self,
        engines: int,
        policy: RoutingPolicy = "least-loaded",
        *,
        block_tokens: int = 16,
        kept_blocks: int = 1 << 20,
    ) -> None:
        """Route to `engines`; `kept_blocks` of each are remembered, where prefixes count."""
        if policy not in ROUTING_POLICIES:
            raise InputError(
                [
                    build_unknown_name_problem(
                        "routing", str(policy), list(ROUTING_POLICIES), "routing"
                    )
                ]
            )
        if engines < 1:
            raise InputError([Problem("engines", f"{engines} are none", "use 1 or more")])
        self.policy = policy
        self.open_requests = [0] * engines
        """Requests of each engine that have not come back."""
        self.open_prompt_tokens = [0] * engines
        """Tokens of their prompts."""
        self._turn = -1
        self._block = block_tokens
        self._sent = [PrefixIndex(kept_blocks) for _ in range(engines)]
        """Blocks sent to each."""

    def assign(
        self,
        prompt_tokens: int,
        block_hashes: Sequence[Hashable] | None = None,
        *,
        unavailable: Collection[int] = (),
    ) -> int:
        """Choose the engine of a request, none of the `unavailable`, and count it there."""
        there: Sequence[int] = range(len(self.open_requests))
        if unavailable:
            there = [engine for engine in there if engine not in unavailable]
        if self.policy == "round-robin":
            after = [engine for engine in there if engine > self._turn]
            self._turn = chosen = (after or there)[0]
        elif self.policy == "least-loaded" or not block_hashes:
            chosen = min(
                [(self.open_requests[one], self.open_prompt_tokens[one], one) for one in there]
            )[2]
        else:
            chosen = self._nearest(prompt_tokens, block_hashes, there)
        if block_hashes and self.policy == "prefix":
            self._sent[chosen].touch(block_hashes)
        self.open_requests[chosen] += 1
        self.open_prompt_tokens[chosen] += prompt_tokens
        return chosen

    def release(self, engine: int, prompt_tokens: int) -> None:
        """Say that a request has come back from its engine, done or not."""
        self.open_requests[engine] -= 1
        self.open_prompt_tokens[engine] -= prompt_tokens

    def _nearest(
        self, prompt_tokens: int, block_hashes: Sequence[Hashable], there: Sequence[int]
    ) -> int:
        """Return who has least to do: what it has open, and what it lacks of this prompt."""
        found, block = self._matched(block_hashes), self._block
        # Of those with equally little to do, the one whose cache has most room.
        work = [
            (
                self.open_prompt_tokens[one] + max(0, prompt_tokens - found[one] * block),
                self.open_requests[one],
                len(self._sent[one]),
                one,
            )
            for one in there
        ]
        return min(work)[3]

    def _matched(self, block_hashes: Sequence[Hashable]) -> list[int]:
        """Count the leading blocks that each engine was sent."""
        return [
            # Where one is remembered, all before it are.
            bisect_left(block_hashes, True, key=lambda one: one not in sent)
            if block_hashes[0] in sent
            else 0
            for sent in self._sent
        ]
