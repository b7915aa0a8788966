"""`StopChecker`: the text of one choice as it grows, and what ends it.

An answer ends with an end-of-text token, a stop token, a stop text, or its last allowed token.
Stop texts are found wherever tokens cut them, and are no part of the answer; text that may be the
beginning of one is held back. Nothing ends an answer within its first `min_tokens` tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.run.serve.output.text_markers import PartialMarkerTracker, find_first_marker
from meshwright.run.serve.request import FinishReason
from meshwright.run.serve.sampling_params import SamplingParams

# A character has at most 4 bytes: so many tokens of one byte each can be waiting for another.
_WAITING = 3

# Wrong bytes without an end must not make a stretch that is decoded again and again.
_LONG = 16


class IncrementalDetokenizer:
    """Text from tokens; `decode` is that of a tokenizer, which may leave special tokens out."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        """The context, then what came since."""
        self._context = 0
        self._told = 0
        """Characters of these tokens' text that were returned before."""

    def add(self, token: int) -> str:
        """Return the text that is certain now that this token came."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("�"):
            return self._cut(text) if len(self._tokens) - self._context >= _LONG else ""
        piece = text[self._told :]
        if piece:
            self._begin(self._tokens[self._context :])
        elif self._context:
            # Left out by the decoder: of no use as context.
            del self._tokens[self._context :]
        return piece

    def flush(self) -> str:
        """Return what was held back."""
        text = self._decode(self._tokens)
        piece = text[self._told :]
        self._told = len(text)
        return piece

    def _begin(self, context: list[int]) -> None:
        self._tokens = context
        self._context = len(context)
        self._told = len(self._decode(context))

    def _cut(self, text: str) -> str:
        """Give up on bytes that are no character, where a cut between tokens changes no text."""
        until = len(self._tokens) - 2 * _WAITING
        before = self._decode(self._tokens[:until])
        if before + self._decode(self._tokens[until:]) != text:
            return ""
        piece = before[self._told :]
        self._tokens, self._context, self._told = self._tokens[until:], 0, 0
        return piece


class StopCheck(NamedTuple):
    """What some tokens added to an answer."""

    num_tokens: int
    """How many of the tokens are part of it: those after its end are not."""
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopChecker:
    """Follows one choice; `room` is how many tokens the context leaves for it."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        sampling: SamplingParams,
        eos: Sequence[int],
        max_tokens: int,
    ) -> None:
        self._written = IncrementalDetokenizer(decode)
        self._stops = tuple(text for text in sampling.stop if text)
        self._partial_stops = PartialMarkerTracker(self._stops)
        self._ends = frozenset(sampling.stop_token_ids)
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos)
        self._least = sampling.min_tokens
        self._most = (
            max_tokens if sampling.max_tokens is None else min(max_tokens, sampling.max_tokens)
        )
        self._held = ""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> StopCheck:
        """Go on with tokens; `ended` says that a grammar lets nothing follow the last of them."""
        text = ""
        for count, token in enumerate(tokens, 1):
            self.num_tokens += 1
            early = self.num_tokens <= self._least
            if not early and (token in self._ends or token in self._eos):
                by = token if token in self._ends else None
                return self._finished(count, text + self._rest(), "stop", by)
            shown, stop = self._search(self._written.add(token), early)
            text += shown
            if stop is not None:
                return self._finished(count, text, "stop", stop)
            if ended and count == len(tokens):
                return self._end(count, text, "stop")
            if self.num_tokens >= self._most:
                return self._end(count, text, "length")
        return StopCheck(len(tokens), text)

    def _search(self, text: str, early: bool) -> tuple[str, str | None]:
        """Return what can be shown of the held and further text, and the stop text in it."""
        self._held += text
        if not self._stops:
            shown, self._held = self._held, ""
            return shown, None
        found = find_first_marker(self._held, self._stops)
        if found is not None and not early:
            return self._held[: found.start], found.text
        keep = self._partial_stops.feed(text)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def _end(self, count: int, text: str, finish: FinishReason) -> StopCheck:
        """End with what was held back, unless a stop text turns out to be in it."""
        shown, stop = self._search(self._written.flush(), self.num_tokens <= self._least)
        if stop is not None:
            return self._finished(count, text + shown, "stop", stop)
        return self._finished(count, text + shown + self._held, finish, None)

    def _rest(self) -> str:
        return self._held + self._written.flush()

    def _finished(
        self, count: int, text: str, finish: FinishReason, stopped_by: str | int | None
    ) -> StopCheck:
        self.finish_reason = finish
        return StopCheck(count, text, finish, stopped_by)
