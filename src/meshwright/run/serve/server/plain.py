"""The endpoints that answer from what is at hand: tokens of texts, and changes of the engine."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.serve.interface import MEMORY, Memory, Renews, Sleeps
from meshwright.run.serve.server.asking import messages_of, named_model, own_values
from meshwright.run.serve.server.bodies import (
    DetokenizeBody,
    SleepBody,
    TokenizeBody,
    WakeBody,
    WeightsBody,
)
from meshwright.run.serve.server.desk import Answer, Desk
from meshwright.run.serve.server.faults import Fault, impossible, refused
from meshwright.run.serve.server.replies import Detokenized, Sleeping, Tokens, Updated
from meshwright.run.serve.server.streams import encode
from meshwright.run.serve.server.tools import shown_tool
from meshwright.run.serve.server.traffic import Call
from meshwright.run.serve.server.words import aside, checked, encoded, written_chat

_TAGGED: dict[str, Memory] = {"weights": "weights", "kv_cache": "cache"}
"""What vLLM's tags name."""


async def tokenize(desk: Desk, body: TokenizeBody, _: Call) -> Answer:
    """Answer with the tokens of a text or of a chat."""
    named_model(body.model, desk.settings)
    if (body.prompt is None) == (body.messages is None):
        raise refused("Give either `prompt` or `messages`", "prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await encoded(desk.words, body.prompt, "prompt", special=special)
    else:
        values = {
            "add_generation_prompt": body.add_generation_prompt,
            **own_values(body.chat_template_kwargs),
        }
        tools = [shown_tool(tool.function) for tool in body.tools or ()] or None
        tokens = await written_chat(desk.words, messages_of(body.messages or []), tools, values)
    words, spells = desk.words, body.return_token_strs

    def written() -> bytes:
        texts = None
        if spells:
            texts = [words.spelled(token).decode(errors="replace") for token in tokens]
        return encode(
            Tokens(
                count=len(tokens),
                max_model_len=desk.engine.max_length,
                tokens=list(tokens),
                token_strs=texts,
            )
        )

    return await aside(written, len(tokens), "prompt")


async def detokenize(desk: Desk, body: DetokenizeBody, _: Call) -> Answer:
    """Answer with the text of tokens, special ones included: the way back of `tokenize`."""
    named_model(body.model, desk.settings)
    words, tokens = desk.words, checked(body.tokens, desk.words, "tokens")
    text = await aside(lambda: words.decode(tokens, skip_special=False), len(tokens), "tokens")
    return encode(Detokenized(text))


async def sleep(desk: Desk, body: SleepBody, _: Call) -> Answer:
    """Put the engine to sleep."""
    engine = _sleeper(desk)
    await _done(desk, engine.sleep(body.level))
    return encode(Sleeping(engine.asleep()))


async def wake_up(desk: Desk, body: WakeBody, _: Call) -> Answer:
    """Wake the engine, or some of its memory."""
    engine = _sleeper(desk)
    parts = MEMORY if body.tags is None else tuple(_TAGGED[tag] for tag in body.tags)
    await _done(desk, engine.wake(parts))
    return encode(Sleeping(engine.asleep()))


async def update_weights(desk: Desk, body: WeightsBody, _: Call) -> Answer:
    """Replace the engine's weights."""
    if not isinstance(desk.engine, Renews):
        raise Fault(501, "This engine cannot change its weights", code="not_offered")
    await _done(desk, desk.engine.update_weights(body.path), "path")
    return encode(Updated(body.path))


async def _done(desk: Desk, change: Coroutine[Any, Any, None], param: str | None = None) -> None:
    """Wait for a change, which goes on to its end even if whoever asked for it goes away."""
    try:
        await asyncio.shield(asyncio.ensure_future(change))
    except InputError as error:
        raise impossible(error, param) from None
    except MeshwrightError as error:
        # It may be as it was before, and well.
        raise Fault(503, str(error), code="ill" if desk.engine.ill() else "failed") from None


def _sleeper(desk: Desk) -> Sleeps:
    if not isinstance(desk.engine, Sleeps):
        raise Fault(501, "This engine cannot sleep", code="not_offered")
    return desk.engine
