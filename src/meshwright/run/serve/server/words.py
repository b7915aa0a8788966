"""`Words`: what the server asks of a tokenizer, and texts made tokens without holding up others."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.serve.server.faults import Fault, impossible

LONG = 20_000
"""Characters beyond which a text is read in a thread: about a millisecond of other streams."""
Made = TypeVar("Made")


class Words(Protocol):
    """Texts to tokens and back."""

    @property
    def size(self) -> int:
        """Tokens are numbers below this one."""

    @property
    def marks(self) -> frozenset[int]:
        """Special tokens, which answers do not show."""

    def encode(self, text: str, /, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the model's first token where `special` and it has one.

        Special tokens that are written out in the text are always taken for themselves.
        """

    def decode(self, ids: Sequence[int], /, *, skip_special: bool = True) -> str:
        """Return the text of tokens; what is no text comes as U+FFFD."""

    def spelled(self, token: int, /) -> bytes:
        """Return the bytes that a token stands for; special ones as they are written."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **values: Any,
    ) -> str:
        """Return the messages as the model's template writes them; `values` are the template's.

        Raises `InputError` where there is no template, or it refuses these messages.
        """


async def encoded(words: Words, text: str, param: str, *, special: bool) -> tuple[int, ...]:
    """Return the tokens of a text; a long one is read in a thread."""
    return await aside(lambda: tuple(words.encode(text, special=special)), len(text), param)


async def written_chat(
    words: Words,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    values: Mapping[str, Any],
    *,
    goes_on: bool = False,
) -> tuple[int, ...]:
    """Return the tokens of a chat; one that `goes_on` ends within its last message."""

    def tokens() -> tuple[int, ...]:
        text = words.chat(messages, tools, **values)
        if goes_on:
            text = _to_the_end_of(str(messages[-1].get("content") or ""), text)
        # The template writes the first token itself.
        return tuple(words.encode(text, special=False))

    size = len(msgspec.json.encode((messages, tools, values)))
    return await aside(tokens, size, "messages")


def _to_the_end_of(last: str, text: str) -> str:
    """Return a chat up to the end of its last message, which templates may trim."""
    for written in (last, last.strip()):
        at = text.rfind(written) if written else -1
        if at >= 0:
            return text[: at + len(written)]
    where = "continue_final_message"
    what = "the last message has no text that the template writes as it is"
    raise InputError([Problem(where, what, "give it text, or leave this out")])


async def aside(work: Callable[[], Made], length: int, param: str) -> Made:
    """Return what some work makes, which is done in a thread where it has much to read."""
    try:
        return await asyncio.to_thread(work) if length > LONG else work()
    except InputError as error:
        raise impossible(error, param) from None


def checked(tokens: Sequence[int], words: Words, param: str) -> tuple[int, ...]:
    """Return a prompt that was given as tokens, all of which the model must have."""
    if tokens and max(tokens) >= words.size:
        raise Fault(
            400,
            f"`{param}` has the token {max(tokens)}; those of this model are below {words.size}",
            param=param,
            code="unknown_token",
        )
    return tuple(tokens)
