"""`ReasoningParser`: what a model thinks before it answers, told apart from the answer."""

from collections.abc import Sequence
from typing import Literal

from meshwright.run.serve.output.output_delta import OutputDelta, OutputParser, WhitespaceTrimmer
from meshwright.run.serve.output.text_markers import count_partial_marker


class PlainTextParser:
    """Takes everything for content."""

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return the text."""
        return [OutputDelta(content=text)] if text else []

    def flush(self) -> Sequence[OutputDelta]:
        """Return nothing: nothing is held back."""
        return ()


class ReasoningParser:
    """Reads `<think>…</think>` at the beginning of an answer; a further reader takes what follows.

    White space around the thoughts is no part of either.
    """

    def __init__(
        self,
        after: OutputParser | None = None,
        *,
        begun: bool = False,
        start: str = "<think>",
        end: str = "</think>",
    ) -> None:
        """Give what follows to `after`; `begun` says that the prompt ended with the start."""
        self._after: OutputParser = PlainTextParser() if after is None else after
        self._start, self._end = start, end
        self._begun = begun
        self._held = ""
        self._thoughts = WhitespaceTrimmer(after=True)
        self._part: Literal["start", "thoughts", "seam", "answer"] = "start"

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[OutputDelta] = []
        if self._part == "start" and not self._decided():
            return heard
        if self._part == "thoughts":
            at = self._held.find(self._end)
            cut = (
                at if at >= 0 else len(self._held) - count_partial_marker(self._held, (self._end,))
            )
            heard += self._thought(self._held[:cut])
            self._held = self._held[cut:]
            if at >= 0:
                self._held, self._part = self._held[len(self._end) :], "seam"
        if self._part == "seam":
            self._held = self._held.lstrip()
            self._part = "answer" if self._held else "seam"
        if self._part == "answer":
            text, self._held = self._held, ""
            heard += self._after.feed(text)
        return heard

    def flush(self) -> Sequence[OutputDelta]:
        """Return what was held back."""
        thinks = self._part == "thoughts" or (self._part == "start" and self._begun)
        heard = self._thought(self._held) if thinks else self._after.feed(self._held)
        return [*heard, *self._after.flush()]

    def _thought(self, text: str) -> list[OutputDelta]:
        thought = self._thoughts.add(text)
        return [OutputDelta(reasoning=thought)] if thought else []

    def _decided(self) -> bool:
        """Say whether it is known that the answer begins with thoughts, or does not."""
        rest = self._held.lstrip()
        if rest.startswith(self._start):
            self._held, self._part = rest[len(self._start) :], "thoughts"
        elif self._start.startswith(rest):
            return False
        else:
            self._part = "thoughts" if self._begun else "answer"
        return True
