"""`Sequence`: the scheduler's state of one completion; `SchedulerOutput`: the work of one step."""

from collections import abc
from collections.abc import Collection, Hashable
from enum import IntEnum
from typing import Any, NamedTuple


class SequenceStatus(IntEnum):
    """Where a sequence is."""

    WAITING = 0
    PREFILLING = 1
    """Some of its known tokens are still to be computed."""
    DECODING = 2
    """One token a step."""
    SPECULATING = 3
    """Some tokens a step, of which those that were guessed right count."""
    FINISHED = 4


class Sequence:
    """One answer: how many tokens it has, how many of them are computed, which blocks it holds."""

    __slots__ = (
        "arrival_order",
        "block_hashes",
        "blocks",
        "decode_epoch",
        "decode_offset",
        "forks",
        "host_blocks",
        "max_total_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_prompt_tokens",
        "num_reserved_blocks",
        "num_tokens",
        "priority",
        "state",
        "status",
        "tenant",
    )  # fmt: skip

    def __init__(
        self,
        num_prompt_tokens: int,
        output: int,
        *,
        state: Any = None,
        block_hashes: abc.Sequence[Hashable] | None = None,
        priority: int = 0,
        tenant: str = "",
        forks: tuple["Sequence", ...] = (),
        num_computed_tokens: int = 0,
    ) -> None:
        """Describe an answer of at most `output` tokens to a prompt of `num_prompt_tokens` tokens.

        `block_hashes` name its full blocks, as far as they are known: whoever knows more adds to
        them. `forks` answer the same prompt. With `num_computed_tokens`, keys and values of so many
        tokens are made elsewhere, and come with it.
        """
        self.state, self.num_prompt_tokens, self.num_tokens, self.max_total_tokens = (
            state,
            num_prompt_tokens,
            num_prompt_tokens,
            num_prompt_tokens + output,
        )
        self.block_hashes, self.priority, self.tenant, self.forks = (
            block_hashes,
            priority,
            tenant,
            forks,
        )
        self.num_computed_tokens = num_computed_tokens
        """Tokens whose keys and values are computed, once the steps so far are done."""
        self.arrival_order = -1
        self.status = SequenceStatus.WAITING
        self.blocks: list[int] = []
        self.num_reserved_blocks = 0
        """Blocks promised and not drawn; of those that decode, only until they began to."""
        self.decode_offset = 0
        """Tokens less the steps done, of those that decode: they get a token with every step."""
        self.decode_epoch = 0
        """Which time of joining those that decode this is; 0 where it does not decode."""
        self.num_cached_blocks = self.num_draft_tokens = 0
        """Blocks that are named; tokens guessed ahead."""
        self.num_cached_tokens: int | None = None
        """Tokens that were found in the cache when it first got a place; None before."""
        self.host_blocks: list[int] = []
        """Blocks of host memory that hold its keys and values meanwhile."""


class ScheduledChunk(NamedTuple):
    """Tokens of one sequence that one step computes."""

    sequence: Sequence
    start: int
    stop: int
    samples_token: bool
    """Whether the last of them has a successor that is not known yet."""


class BlockSwap(NamedTuple):
    """Blocks of one sequence on their way between the device and host memory."""

    sequence: Sequence
    device_blocks: list[int]
    host_blocks: list[int]


class SchedulerOutput:
    """What one step does, in this order: copies, moves out, moves in, then the rest at once."""

    __slots__ = (
        "admitted",
        "attended_tokens",
        "block_copies",
        "chunks",
        "finished",
        "forked",
        "growing",
        "num_decodes",
        "preempted",
        "started_decoding",
        "swap_in",
        "swap_out",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_decodes = 0
        """Sequences that compute one token each: all that decode."""
        self.attended_tokens = 0
        """Keys that these look at, their own included."""
        self.chunks: list[ScheduledChunk] = []
        self.admitted: list[Sequence] = []
        """Those that got blocks, but for the decoding ones: admitted now, or guessing further."""
        self.growing: Collection[Sequence] = ()
        """Decoding sequences that begin a new block."""
        self.started_decoding: list[Sequence] = []
        """Those that decode from the next step on."""
        self.forked: list[tuple[Sequence, Sequence]] = []
        """Sequences and those that go on beside them, with another first token."""
        self.finished: list[Sequence] = []
        """Those for whom this step brings the last token that they may have."""
        self.preempted: list[Sequence] = []
        self.block_copies: list[tuple[int, int]] = []
        """Blocks and the blocks that they are copied to."""
        self.swap_out: list[BlockSwap] = []
        self.swap_in: list[BlockSwap] = []
