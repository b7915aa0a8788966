"""`Answer`: the text of one choice as it grows, and what ends it.

An answer ends with an end-of-text token, a stop token, a stop text, or its last allowed token.
Stop texts are found wherever tokens cut them, and are no part of the answer; text that may be the
beginning of one is held back. Nothing ends an answer within its first `min_tokens` tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.run.serve.asked import Finish, Sampling
from meshwright.run.serve.sampling.markers import first_found, unfinished
from meshwright.run.serve.sampling.written import Written


class Step(NamedTuple):
    """What some tokens added to an answer."""

    tokens: int
    """How many of the tokens are part of it: those after its end are not."""
    text: str
    finish: Finish | None = None
    stopped_by: str | int | None = None


class Answer:
    """Follows one choice; `room` is how many tokens the context leaves for it."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        sampling: Sampling,
        eos: Sequence[int],
        room: int,
    ) -> None:
        self._written = Written(decode)
        self._stops = tuple(text for text in sampling.stop if text)
        self._ends = frozenset(sampling.stop_tokens)
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos)
        self._least = sampling.min_tokens
        self._most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        self._held = ""
        self.tokens = 0
        self.finish: Finish | None = None

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> Step:
        """Go on with tokens; `ended` says that a grammar lets nothing follow the last of them."""
        text = ""
        for count, token in enumerate(tokens, 1):
            self.tokens += 1
            early = self.tokens <= self._least
            if not early and (token in self._ends or token in self._eos):
                by = token if token in self._ends else None
                return self._finished(count, text + self._rest(), "stop", by)
            self._held += self._written.add(token)
            shown, stop = self._search(early)
            text += shown
            if stop is not None:
                return self._finished(count, text, "stop", stop)
            if ended and count == len(tokens):
                return self._end(count, text, "stop")
            if self.tokens >= self._most:
                return self._end(count, text, "length")
        return Step(len(tokens), text)

    def _search(self, early: bool) -> tuple[str, str | None]:
        """Return what can be shown of the held text, and the stop text that is in it."""
        if not self._stops:
            shown, self._held = self._held, ""
            return shown, None
        found = first_found(self._held, self._stops)
        if found is not None and not early:
            return self._held[: found.start], found.text
        keep = unfinished(self._held, self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def _end(self, count: int, text: str, finish: Finish) -> Step:
        """End with what was held back, unless a stop text turns out to be in it."""
        self._held += self._written.end()
        shown, stop = self._search(self.tokens <= self._least)
        if stop is not None:
            return self._finished(count, text + shown, "stop", stop)
        return self._finished(count, text + shown + self._held, finish, None)

    def _rest(self) -> str:
        return self._held + self._written.end()

    def _finished(
        self, count: int, text: str, finish: Finish, stopped_by: str | int | None
    ) -> Step:
        self.finish = finish
        return Step(count, text, finish, stopped_by)
