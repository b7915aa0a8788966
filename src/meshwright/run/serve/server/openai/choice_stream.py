"""`ChoiceStream`: all choices of a request, event by event as their pieces come."""

from collections.abc import Sequence
from typing import Protocol

from meshwright.run.serve.request import RequestOutput
from meshwright.run.serve.server.protocol.response_schema import UsageInfo
from meshwright.run.serve.server.request_tracker import RequestTrackerGroup
from meshwright.run.serve.server.sse import ChunkTemplate, TokenCounter


class ChoiceEvents(Protocol):
    """One choice, as a request's kind of answer writes it."""

    async def format_prompt(self, output: RequestOutput) -> None:
        """Take the log-probabilities of a prompt, which are many, in parts."""

    def encode_events(
        self, output: RequestOutput, frame: ChunkTemplate, usage: TokenCounter
    ) -> bytes:
        """Return what a piece adds, as events; nothing where it shows nothing."""


class ChoiceStream:
    """The events of all choices, those of several prompts one prompt after the other."""

    def __init__(
        self, replies: RequestTrackerGroup, choices: Sequence[ChoiceEvents], frame: ChunkTemplate
    ) -> None:
        self._replies, self._choices, self._frame = replies, choices, frame
        self._ended = False
        self._sent = 0
        """Tokens of answers that events have told of, where every event counts them."""

    async def next_events(self) -> bytes:
        """Return the next events."""
        while not self._ended:
            first, pieces = await self._replies.next_outputs()
            if not pieces:
                self._ended = True
                return self._frame.final_events(self._replies.build_usage())
            choices, frame, usage = self._choices, self._frame, self._usage
            for piece in pieces:
                if piece.prompt_logprobs:
                    await choices[first + piece.index].format_prompt(piece)
            if data := b"".join(
                [
                    choices[first + piece.index].encode_events(piece, frame, usage)
                    for piece in pieces
                ]
                if frame.has_constant_usage
                else [self._counted(choices[first + piece.index], piece) for piece in pieces]
            ):
                return data
        return b""

    def _counted(self, choice: ChoiceEvents, output: RequestOutput) -> bytes:
        self._sent += len(output.token_ids)
        return choice.encode_events(output, self._frame, self._usage)

    def _usage(self, unsent: int = 0) -> UsageInfo:
        return self._replies.build_usage(self._sent - unsent)
