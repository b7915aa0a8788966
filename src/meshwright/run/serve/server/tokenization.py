"""Tokenization off the event loop, and its problems as errors of a request."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.serve.server.api_errors import ApiError, unservable_request
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

THREAD_THRESHOLD_CHARS = 20_000
"""Characters beyond which a text is read in a thread: about a millisecond of other streams."""
Made = TypeVar("Made")


async def encode_text(
    tokenizer: TokenizerLike, text: str, param: str, *, special: bool
) -> tuple[int, ...]:
    """Return the tokens of a text; a long one is read in a thread."""
    return await run_in_thread_if_long(
        lambda: tuple(tokenizer.encode(text, special=special)), len(text), param
    )


async def encode_chat_prompt(
    tokenizer: TokenizerLike,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    values: Mapping[str, Any],
    *,
    goes_on: bool = False,
) -> tuple[int, ...]:
    """Return the tokens of a chat; one that `goes_on` ends within its last message."""

    def tokens() -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(messages, tools, **values)
        if goes_on:
            text = _to_the_end_of(str(messages[-1].get("content") or ""), text)
        # The template writes the first token itself.
        return tuple(tokenizer.encode(text, special=False))

    size = len(msgspec.json.encode((messages, tools, values)))
    return await run_in_thread_if_long(tokens, size, "messages")


def _to_the_end_of(last: str, text: str) -> str:
    """Return a chat up to the end of its last message, which templates may trim."""
    for written in (last, last.strip()):
        at = text.rfind(written) if written else -1
        if at >= 0:
            return text[: at + len(written)]
    where = "continue_final_message"
    what = "the last message has no text that the template writes as it is"
    raise InputError([Problem(where, what, "give it text, or leave this out")])


async def run_in_thread_if_long(work: Callable[[], Made], length: int, param: str) -> Made:
    """Return what some work makes, which is done in a thread where it has much to read."""
    try:
        return await asyncio.to_thread(work) if length > THREAD_THRESHOLD_CHARS else work()
    except InputError as error:
        raise unservable_request(error, param) from None


def validate_token_ids(
    tokens: Sequence[int], tokenizer: TokenizerLike, param: str
) -> tuple[int, ...]:
    """Return a prompt that was given as tokens, all of which the model must have."""
    if tokens and max(tokens) >= tokenizer.vocab_size:
        raise ApiError(
            400,
            f"`{param}` has the token {max(tokens)}; those of this model are below "
            f"{tokenizer.vocab_size}",
            param=param,
            code="invalid_token_id",
        )
    return tuple(tokens)
