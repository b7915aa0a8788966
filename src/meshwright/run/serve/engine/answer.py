"""`Answer`: one choice of an ask in the making, from its prompt to its end."""

from collections.abc import Callable
from typing import Protocol

from meshwright.policy.kv import block_keys
from meshwright.policy.sequences import Sequence
from meshwright.run.serve.asked import Ask, Finish, Piece, TokenLogprob

Sink = Callable[[Piece], None]


class Text(Protocol):
    """Makes the text of one answer from its tokens, and sees where it ends."""

    def add(self, token: int) -> str:
        """Return what can be shown more."""

    @property
    def stopped_by(self) -> str | None:
        """The text that ended it."""

    def rest(self) -> str:
        """Return what was held back, when no more tokens come."""


class Answer:
    """What the host knows of one answer."""

    __slots__ = (
        "adapter", "ask", "begun", "cached", "choice", "ends", "finish", "ids", "keys", "most",
        "row", "salt", "sequence", "sink", "text",
    )  # fmt: skip

    def __init__(
        self,
        ask: Ask,
        choice: int,
        most: int,
        sink: Sink,
        *,
        ends: frozenset[int],
        text: Text | None = None,
        adapter: int = -1,
    ) -> None:
        """Begin an answer of at most `most` tokens; `ends` are those that end it."""
        self.ask, self.choice, self.most, self.sink = ask, choice, most, sink
        self.ends, self.text, self.adapter = ends, text, adapter
        self.ids = list(ask.prompt)
        """The prompt and what came after it, as far as the host has seen it."""
        self.salt = b"" if ask.adapter is None else ask.adapter.encode()[:64]
        self.keys: list[bytes] = []
        """Names of its full blocks."""
        self.row = -1
        self.begun = False
        self.finish: Finish | None = None
        self.sequence: Sequence

    @property
    def written(self) -> int:
        """Tokens of the answer so far."""
        return len(self.ids) - len(self.ask.prompt)

    def name_blocks(self, block_tokens: int) -> None:
        """Name the blocks that have become full."""
        known = len(self.keys) * block_tokens
        if len(self.ids) - known >= block_tokens:
            after = self.keys[-1] if self.keys else b""
            self.keys += block_keys(self.ids[known:], block_tokens, after=after, salt=self.salt)

    def take(self, token: int, told: tuple[TokenLogprob, ...] = ()) -> Piece:
        """Take the next token; the answer's `finish` says whether it was the last."""
        if token < 0:
            self.finish = "error"
            return self._piece((), "", error="the model gave no number for any token")
        self.ids.append(token)
        sampling = self.ask.sampling
        if token in self.ends and self.written > sampling.min_tokens:
            self.finish = "stop"
            rest = "" if self.text is None else self.text.rest()
            return self._piece((token,), rest, told, stopped_by=token)
        shown = "" if self.text is None else self.text.add(token)
        stop = None if self.text is None else self.text.stopped_by
        if stop is not None:
            self.finish = "stop"
        elif self.written >= self.most:
            self.finish = "length"
            shown += "" if self.text is None else self.text.rest()
        return self._piece((token,), shown, told, stopped_by=stop)

    def cancel(self) -> Piece:
        """End an answer that nobody waits for."""
        self.finish = "cancelled"
        return self._piece((), "")

    def fail(self, why: str) -> Piece:
        """End an answer by an error."""
        self.finish = "error"
        return self._piece((), "", error=why)

    def _piece(
        self,
        tokens: tuple[int, ...],
        text: str,
        told: tuple[TokenLogprob, ...] = (),
        *,
        stopped_by: str | int | None = None,
        error: str = "",
    ) -> Piece:
        first, self.begun = not self.begun, True
        if isinstance(stopped_by, int) and stopped_by not in self.ask.sampling.stop_tokens:
            stopped_by = None
        return Piece(
            choice=self.choice,
            tokens=tokens,
            text=text,
            logprobs=told,
            finish=self.finish,
            stopped_by=stopped_by,
            error=error,
            cached_tokens=self.sequence.cached if first else 0,
        )
