"""`Answer`: one choice of an ask in the making, from its prompt to its end."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from meshwright.errors import InputError
from meshwright.policy import sequences
from meshwright.policy.kv import block_keys, salt_of
from meshwright.run.serve.asked import Ask, Finish, Piece, Sink, TokenLogprob
from meshwright.run.serve.parcels import Parcel
from meshwright.run.serve.sampling.grammar import Guide
from meshwright.run.serve.sampling.lines import COLD
from meshwright.run.serve.sampling.stops import Step

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.run.serve.engine.prompt_telling import PromptTelling


class Text(Protocol):
    """Follows one choice: its text, and what ends it."""

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> Step:
        """Go on with tokens; `ended` says that a grammar lets nothing follow the last of them."""


class Silent:
    """Follows a choice of which nobody wants the text."""

    def __init__(self, ends: frozenset[int], stops: frozenset[int], least: int, most: int) -> None:
        self._ends, self._stops, self._least, self._most = ends | stops, stops, least, most
        self._count = 0

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> Step:
        """Go on with tokens."""
        for place, token in enumerate(tokens, 1):
            self._count += 1
            if token in self._ends and self._count > self._least:
                return Step(place, "", "stop", token if token in self._stops else None)
            if ended and place == len(tokens):
                return Step(place, "", "stop")
            if self._count >= self._most:
                return Step(place, "", "length")
        return Step(len(tokens), "")


class Answer:
    """What the host knows of one answer."""

    __slots__ = (
        "adapter", "ask", "begun", "brought", "choice", "finish", "guessed", "guide", "ids",
        "keys", "most", "prompt_telling", "queued_s", "row", "salt", "seeded", "sequence",
        "since_s", "sink", "taken", "text",
    )  # fmt: skip

    def __init__(
        self,
        ask: Ask,
        choice: int,
        most: int,
        sink: Sink,
        text: Text,
        *,
        guide: Guide | None = None,
        adapter: int = -1,
        seeded: bool = True,
        version: int = 0,
    ) -> None:
        """Begin an answer of at most `most` tokens; a `guide` says which may follow.

        `seeded` is false where nobody named a seed, so that any draw of the right chances will do;
        `version` is that of the weights.
        """
        self.ask, self.choice, self.most, self.sink = ask, choice, most, sink
        self.text, self.guide, self.adapter = text, guide, adapter
        self.seeded = seeded
        self.ids = list(ask.prompt)
        """The prompt and what came after it, as far as the host has seen it."""
        self.salt = salt_of(version, ask.adapter)
        self.keys: list[bytes] = []
        """Names of its full blocks."""
        self.guessed: tuple[int, ...] = ()
        """Tokens that may come next, to be checked by the next step."""
        self.brought: bytes | bytearray | None = None
        """Keys and values of the prompt that came with it, until it has blocks for them."""
        self.taken: Tensor | None = None
        """Keys and values of the prompt on their way to another engine."""
        self.prompt_telling: PromptTelling | None = None
        """How likely the prompt's tokens were, where that was asked."""
        self.row = -1
        self.since_s = time.monotonic()
        self.queued_s: float | None = None
        """How long it waited for its first row, once it has had one."""
        self.begun = False
        self.finish: Finish | None = None
        self.sequence: sequences.Sequence

    @property
    def by_chance(self) -> bool:
        """Whether its guesses may be taken by rejection, and not only where it draws the same."""
        return not self.seeded and self.ask.sampling.temperature > COLD

    @property
    def written(self) -> int:
        """Tokens of the answer so far."""
        return len(self.ids) - len(self.ask.prompt)

    def take_row(self, row: int) -> None:
        """Take a row of the device, the first or another one."""
        self.row = row
        if self.queued_s is None:
            self.queued_s = time.monotonic() - self.since_s

    def name_blocks(self, block_tokens: int) -> None:
        """Name the blocks that have become full."""
        known = len(self.keys) * block_tokens
        if len(self.ids) - known >= block_tokens:
            after = self.keys[-1] if self.keys else b""
            self.keys += block_keys(self.ids[known:], block_tokens, after=after, salt=self.salt)

    def take(self, tokens: Sequence[int], told: tuple[TokenLogprob, ...] = ()) -> Piece:
        """Take the next tokens; the answer's `finish` says whether they were the last."""
        if min(tokens) < 0:
            return self.fail("the model gave no number for any token")
        ended = False
        if self.guide is not None:
            try:
                tokens = tokens[: self.guide.advance(tokens)]
            except InputError as error:
                return self.fail(str(error))
            ended = self.guide.ended
        step = self.text.add(tokens, ended=ended)
        self.ids += tokens[: step.tokens]
        self.finish = step.finish
        shown = tuple(tokens[: step.tokens])
        return self._piece(shown, step.text, told[: step.tokens], stopped_by=step.stopped_by)

    def hand_over(self, parcel: Parcel) -> Piece:
        """End an answer that another engine goes on with."""
        self.finish = "length"
        return msgspec.structs.replace(self._piece(), parcel=parcel)

    def cancel(self) -> Piece:
        """End an answer that nobody waits for."""
        self.finish = "cancelled"
        return self._piece()

    def fail(self, why: str) -> Piece:
        """End an answer by an error."""
        self.finish = "error"
        return self._piece(error=why)

    def _piece(
        self,
        tokens: tuple[int, ...] = (),
        text: str = "",
        told: tuple[TokenLogprob, ...] = (),
        *,
        stopped_by: str | int | None = None,
        error: str = "",
    ) -> Piece:
        first, self.begun = not self.begun, True
        likely: tuple[TokenLogprob, ...] = ()
        # An answer that ends before its first token has nothing more to tell.
        if first and tokens and self.prompt_telling is not None:
            likely = self.prompt_telling.read()
        return Piece(
            choice=self.choice,
            tokens=tokens,
            text=text,
            logprobs=told,
            finish=self.finish,
            stopped_by=stopped_by,
            error=error,
            cached_tokens=(self.sequence.cached or 0) if first else 0,
            queued_s=self.queued_s if first else None,
            prompt_logprobs=likely,
        )
