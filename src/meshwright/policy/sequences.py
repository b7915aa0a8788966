"""`Sequence`: one answer in the making, as the batcher sees it, and `Batch`, what one step does."""

from collections import abc
from collections.abc import Collection, Hashable
from enum import IntEnum
from typing import Any, NamedTuple


class State(IntEnum):
    """Where a sequence is."""

    WAITING = 0
    PREFILLING = 1
    """Some of its known tokens are still to be computed."""
    DECODING = 2
    """One token a step."""
    GUESSING = 3
    """Some tokens a step, of which those that were guessed right count."""
    OVER = 4


class Sequence:
    """One answer: how many tokens it has, how many of them are computed, which blocks it holds."""

    __slots__ = (
        "away", "blocks", "cached", "done", "end", "forks", "guesses", "keys", "lead", "named",
        "order", "priority", "promised", "prompt", "request", "state", "tenant", "ticket", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt: int,
        output: int,
        *,
        request: Any = None,
        keys: abc.Sequence[Hashable] | None = None,
        priority: int = 0,
        tenant: str = "",
        forks: tuple["Sequence", ...] = (),
        done: int = 0,
    ) -> None:
        """Describe an answer of at most `output` tokens to a prompt of `prompt` tokens.

        `keys` name its full blocks, as far as they are known: whoever knows more adds to them.
        `forks` answer the same prompt. With `done`, keys and values of so many tokens are made
        elsewhere, and come with it.
        """
        self.request, self.prompt, self.tokens, self.end = request, prompt, prompt, prompt + output
        self.keys, self.priority, self.tenant, self.forks = keys, priority, tenant, forks
        self.done = done
        """Tokens whose keys and values are computed, once the steps so far are done."""
        self.order = -1
        self.state = State.WAITING
        self.blocks: list[int] = []
        self.promised = 0
        """Blocks promised and not drawn; of those that decode, only until they began to."""
        self.lead = 0
        """Tokens less the steps done, of those that decode: they get a token with every step."""
        self.ticket = 0
        """Which time of joining those that decode this is; 0 where it does not decode."""
        self.named = self.guesses = 0
        """Blocks that are named; tokens guessed ahead."""
        self.cached: int | None = None
        """Tokens that were found in the cache when it first got a place; None before."""
        self.away: list[int] = []
        """Blocks of host memory that hold its keys and values meanwhile."""


class Chunk(NamedTuple):
    """Tokens of one sequence that one step computes."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    """Whether the last of them has a successor that is not known yet."""


class Move(NamedTuple):
    """Blocks of one sequence on their way between the device and host memory."""

    sequence: Sequence
    device: list[int]
    host: list[int]


class Batch:
    """What one step does, in this order: copies, moves out, moves in, then the rest at once."""

    __slots__ = (
        "chunks", "context", "copies", "decodes", "finished", "forked", "grown", "joined",
        "moved_in", "moved_out", "placed", "preempted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.decodes = 0
        """Sequences that compute one token each: all that decode."""
        self.context = 0
        """Keys that these look at, their own included."""
        self.chunks: list[Chunk] = []
        self.placed: list[Sequence] = []
        """Those that got blocks, but for the decoding ones: admitted now, or guessing further."""
        self.grown: Collection[Sequence] = ()
        """Decoding sequences that begin a new block."""
        self.joined: list[Sequence] = []
        """Those that decode from the next step on."""
        self.forked: list[tuple[Sequence, Sequence]] = []
        """Sequences and those that go on beside them, with another first token."""
        self.finished: list[Sequence] = []
        """Those for whom this step brings the last token that they may have."""
        self.preempted: list[Sequence] = []
        self.copies: list[tuple[int, int]] = []
        """Blocks and the blocks that they are copied to."""
        self.moved_out: list[Move] = []
        self.moved_in: list[Move] = []
