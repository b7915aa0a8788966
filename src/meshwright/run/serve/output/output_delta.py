"""`OutputDelta`: a piece of output text, split into content, reasoning and tool calls."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class OutputDelta(NamedTuple):
    """A stretch of what was said."""

    content: str = ""
    reasoning: str = ""
    tool_index: int | None = None
    """Which of the calls `name` and `arguments` belong to."""
    name: str = ""
    """On the first stretch of a call."""
    arguments: str = ""


class OutputParser(Protocol):
    """Tells apart what one choice says."""

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return what can be told of a further stretch of text."""

    def flush(self) -> Sequence[OutputDelta]:
        """Return what was held back."""


class WhitespaceTrimmer:
    """Text without the white space between it and what is no part of it."""

    def __init__(self, *, after: bool = False) -> None:
        self._space = ""
        self._after = after
        self._said = False

    def add(self, text: str) -> str:
        """Return text, less white space that may turn out to lie before something else."""
        if self._after and not self._said:
            text = text.lstrip()
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._said, self._after = True, False
        return kept

    def mark_boundary(self) -> None:
        """Say that something comes here that is no part of the text."""
        self._space, self._after = "", True

    def flush(self) -> str:
        """Return white space that belongs to the text after all."""
        return "" if self._after else self._space
