"""`ChoiceStream`: all choices of a request, event by event as their pieces come."""

from collections.abc import Sequence
from typing import Protocol

from meshwright.run.serve.asked import Piece
from meshwright.run.serve.server.replies import Usage
from meshwright.run.serve.server.streams import Counts, Frame
from meshwright.run.serve.server.under_way import Replies


class Tells(Protocol):
    """One choice, as a request's kind of answer writes it."""

    def event(self, piece: Piece, frame: Frame, usage: Counts) -> bytes:
        """Return what a piece adds, as events; nothing where it shows nothing."""


class ChoiceStream:
    """The events of all choices, those of several prompts one prompt after the other."""

    def __init__(self, replies: Replies, choices: Sequence[Tells], frame: Frame) -> None:
        self._replies, self._choices, self._frame = replies, choices, frame
        self._ended = False
        self._sent = 0
        """Tokens of answers that events have told of, where every event counts them."""

    async def some(self) -> bytes:
        """Return the next events."""
        while not self._ended:
            first, pieces = await self._replies.some()
            if not pieces:
                self._ended = True
                return self._frame.last(self._replies.usage())
            choices, frame, usage = self._choices, self._frame, self._usage
            if data := b"".join(
                [choices[first + piece.choice].event(piece, frame, usage) for piece in pieces]
                if frame.steady
                else [self._counted(choices[first + piece.choice], piece) for piece in pieces]
            ):
                return data
        return b""

    def _counted(self, choice: Tells, piece: Piece) -> bytes:
        self._sent += len(piece.tokens)
        return choice.event(piece, self._frame, self._usage)

    def _usage(self, unsent: int = 0) -> Usage:
        return self._replies.usage(self._sent - unsent)
