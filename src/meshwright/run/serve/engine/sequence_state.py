"""`SequenceState`: one choice of an ask in the making, from its prompt to its end."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from meshwright.errors import InputError
from meshwright.policy.serving import sequence
from meshwright.policy.serving.block_pool import compute_cache_salt, hash_blocks
from meshwright.run.serve.kv_transfer.handle import KVTransferHandle
from meshwright.run.serve.output.detokenizer import StopCheck
from meshwright.run.serve.request import (
    FinishReason,
    OutputSink,
    Request,
    RequestOutput,
    TokenLogprob,
)
from meshwright.run.serve.sampling.sampling_metadata import MIN_TEMPERATURE
from meshwright.run.serve.sampling.structured_output import GrammarMatcher

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.run.serve.engine.logprobs import PromptLogprobsCollector


class StopCondition(Protocol):
    """Follows one choice: its text, and what ends it."""

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> StopCheck:
        """Go on with tokens; `ended` says that a grammar lets nothing follow the last of them."""


class TokenStopCondition:
    """Follows a choice of which nobody wants the text."""

    def __init__(
        self, ends: frozenset[int], stops: frozenset[int], least: int, max_tokens: int
    ) -> None:
        self._ends, self._stops, self._least, self._most = ends | stops, stops, least, max_tokens
        self._count = 0

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> StopCheck:
        """Go on with tokens."""
        for place, token in enumerate(tokens, 1):
            self._count += 1
            if token in self._ends and self._count > self._least:
                return StopCheck(place, "", "stop", token if token in self._stops else None)
            if ended and place == len(tokens):
                return StopCheck(place, "", "stop")
            if self._count >= self._most:
                return StopCheck(place, "", "length")
        return StopCheck(len(tokens), "")


class SequenceState:
    """What the host knows of one answer."""

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "cache_salt",
        "draft_token_ids",
        "finish_reason",
        "grammar",
        "has_output",
        "has_seed",
        "index",
        "lora_slot",
        "max_tokens",
        "packed_kv",
        "prompt_logprobs_collector",
        "queue_s",
        "received_kv",
        "request",
        "row",
        "sequence",
        "sink",
        "stop_condition",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        max_tokens: int,
        sink: OutputSink,
        stop_condition: StopCondition,
        *,
        grammar: GrammarMatcher | None = None,
        lora_slot: int = -1,
        has_seed: bool = True,
        version: int = 0,
    ) -> None:
        """Begin an answer of at most `max_tokens` tokens; a `grammar` says which may follow.

        `has_seed` is false where nobody named a seed, so that any draw of the right chances will
        do; `version` is that of the weights.
        """
        self.request, self.index, self.max_tokens, self.sink = request, index, max_tokens, sink
        self.stop_condition, self.grammar, self.lora_slot = stop_condition, grammar, lora_slot
        self.has_seed = has_seed
        self.token_ids = list(request.prompt_token_ids)
        """The prompt and what came after it, as far as the host has seen it."""
        self.cache_salt = compute_cache_salt(version, request.lora_name)
        self.block_hashes: list[bytes] = []
        """Names of its full blocks."""
        self.draft_token_ids: tuple[int, ...] = ()
        """Tokens that may come next, to be checked by the next step."""
        self.received_kv: bytes | bytearray | None = None
        """Keys and values of the prompt that came with it, until it has blocks for them."""
        self.packed_kv: Tensor | None = None
        """Keys and values of the prompt on their way to another engine."""
        self.prompt_logprobs_collector: PromptLogprobsCollector | None = None
        """How likely the prompt's tokens were, where that was asked."""
        self.row = -1
        self.arrival_s = time.monotonic()
        self.queue_s: float | None = None
        """How long it waited for its first row, once it has had one."""
        self.has_output = False
        self.finish_reason: FinishReason | None = None
        self.sequence: sequence.Sequence

    @property
    def uses_rejection_sampling(self) -> bool:
        """Whether its guesses may be taken by rejection, and not only where it draws the same."""
        return not self.has_seed and self.request.sampling_params.temperature > MIN_TEMPERATURE

    @property
    def output_token_count(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def assign_row(self, row: int) -> None:
        """Take a row of the device, the first or another one."""
        self.row = row
        if self.queue_s is None:
            self.queue_s = time.monotonic() - self.arrival_s

    def hash_full_blocks(self, block_tokens: int) -> None:
        """Name the blocks that have become full."""
        known = len(self.block_hashes) * block_tokens
        if len(self.token_ids) - known >= block_tokens:
            after = self.block_hashes[-1] if self.block_hashes else b""
            self.block_hashes += hash_blocks(
                self.token_ids[known:], block_tokens, after=after, salt=self.cache_salt
            )

    def append(self, tokens: Sequence[int], told: tuple[TokenLogprob, ...] = ()) -> RequestOutput:
        """Take the next tokens; the answer's `finish_reason` says whether they were the last."""
        if min(tokens) < 0:
            return self.finish_with_error("the model gave no number for any token")
        ended = False
        if self.grammar is not None:
            try:
                tokens = tokens[: self.grammar.accept_tokens(tokens)]
            except InputError as error:
                # A grammar may turn out too large only where the answer has got to.
                failed = self.finish_with_error(str(error))
                return msgspec.structs.replace(failed, is_request_error=True)
            ended = self.grammar.is_terminated
        step = self.stop_condition.add(tokens, ended=ended)
        self.token_ids += tokens[: step.num_tokens]
        self.finish_reason = step.finish_reason
        shown = tuple(tokens[: step.num_tokens])
        return self._piece(shown, step.text, told[: step.num_tokens], stopped_by=step.stop_reason)

    def finish_with_kv(self, handle: KVTransferHandle) -> RequestOutput:
        """End an answer that another engine goes on with."""
        self.finish_reason = "length"
        return msgspec.structs.replace(self._piece(), kv_handle=handle)

    def abort(self) -> RequestOutput:
        """End an answer that nobody waits for."""
        self.finish_reason = "abort"
        return self._piece()

    def finish_with_error(self, why: str) -> RequestOutput:
        """End an answer by an error."""
        self.finish_reason = "error"
        return self._piece(error=why)

    def _piece(
        self,
        tokens: tuple[int, ...] = (),
        text: str = "",
        told: tuple[TokenLogprob, ...] = (),
        *,
        stopped_by: str | int | None = None,
        error: str = "",
    ) -> RequestOutput:
        first, self.has_output = not self.has_output, True
        likely: tuple[TokenLogprob, ...] = ()
        # An answer that ends before its first token has nothing more to tell.
        if first and tokens and self.prompt_logprobs_collector is not None:
            likely = self.prompt_logprobs_collector.read()
        return RequestOutput(
            index=self.index,
            token_ids=tokens,
            text=text,
            logprobs=told,
            finish_reason=self.finish_reason,
            stop_reason=stopped_by,
            error=error,
            cached_tokens=(self.sequence.num_cached_tokens or 0) if first else 0,
            queue_s=self.queue_s if first else None,
            prompt_logprobs=likely,
        )
