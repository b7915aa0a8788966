"""One request on its way: sent, its answer read piece by piece, its end put into words."""

import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshwright.observe.bench.serving.served import Served
from meshwright.observe.bench.serving.wire import Answer, message_of

if TYPE_CHECKING:
    import aiohttp

_JSON = {"Content-Type": "application/json"}
_SHOWN = 300


class Prepared(NamedTuple):
    """A request that is ready to be sent."""

    number: int
    due_s: float
    body: bytes
    prompt_tokens: int
    output_tokens: int


class Line(NamedTuple):
    """Where requests go, and how much of their answers is kept."""

    session: "aiohttp.ClientSession"
    url: str
    keep: bool = False


async def ask(line: Line, prepared: Prepared, begun: float, due_s: float | None = None) -> Served:
    """Send one request and read its answer to the end; whatever happens becomes a `Served`.

    `begun` is the start of the run on `time.perf_counter`; `due_s` takes the place of the time that
    the request was prepared for.
    """
    answer, fault, detail = Answer(), "", ""
    sent = time.perf_counter()
    try:
        fault, detail = await _read(line, prepared.body, answer)
    except Exception as error:  # noqa: BLE001 - what is our own fault goes on
        fault, detail = _cause(error)
    end = time.perf_counter()
    if not fault and answer.error:
        fault, detail = "error in the stream", answer.error
    elif not fault and not (answer.complete and answer.times_s):
        fault = "cut off" if answer.times_s else "no token"
        detail = f"{answer.tokens} tokens came, and the end of the stream was {_told(answer)}"
    marks = [sent, *answer.times_s]
    counts = tuple(answer.counts)
    return Served(
        index=prepared.number,
        due_s=prepared.due_s if due_s is None else due_s,
        sent_s=sent - begun,
        end_s=end - begun,
        asked_prompt=prepared.prompt_tokens,
        asked_output=prepared.output_tokens,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.tokens,
        cached_tokens=answer.cached_tokens,
        pieces_us=_steps_us(marks),
        piece_tokens=() if all(count == 1 for count in counts) else counts,
        finish=answer.finish,
        fault=fault,
        detail=detail,
        digest=answer.digest,
        answer=answer.content if line.keep else None,
    )


def _steps_us(marks: list[float]) -> tuple[int, ...]:
    """Return distances in whole microseconds that add up to the whole without drifting."""
    whole = [round((mark - marks[0]) * 1e6) for mark in marks]
    return tuple(after - before for before, after in pairwise(whole))


def _told(answer: Answer) -> str:
    return "told" if answer.complete else "not told"


async def _read(line: Line, body: bytes, answer: Answer) -> tuple[str, str]:
    """Read an answer as it comes; return what is wrong with the reply itself."""
    async with line.session.post(line.url, data=body, headers=_JSON) as reply:
        if reply.status != 200:
            return f"HTTP {reply.status}", _message(await reply.read())
        if not reply.headers.get("Content-Type", "").startswith("text/event-stream"):
            return "no stream", _message(await reply.read())
        now, feed = time.perf_counter, answer.feed
        async for some in reply.content.iter_any():
            feed(some, now())
    return "", ""


def _message(data: bytes) -> str:
    try:
        return message_of(msgspec.json.decode(data))[:_SHOWN]
    except msgspec.DecodeError:
        return data[:_SHOWN].decode(errors="replace")


def _cause(error: Exception) -> tuple[str, str]:
    import aiohttp

    said = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        return "timed out", said
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection", said
    if isinstance(error, aiohttp.ClientError | OSError):
        return "connection broken", said
    raise error
