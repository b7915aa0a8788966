"""One request on its way: sent, its answer read piece by piece, its end put into words."""

import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshwright.observe.bench.serving.openai_protocol import StreamParser, extract_error_message
from meshwright.observe.bench.serving.request_result import RequestResult

if TYPE_CHECKING:
    import aiohttp

_JSON = {"Content-Type": "application/json"}
_SHOWN = 300


class PreparedRequest(NamedTuple):
    """A request that is ready to be sent."""

    request_index: int
    scheduled_s: float
    body: bytes
    prompt_tokens: int
    output_tokens: int


class ServerConnection(NamedTuple):
    """Where requests go, and how much of their answers is kept."""

    session: "aiohttp.ClientSession"
    url: str
    keep_answers: bool = False


async def send_request(
    line: ServerConnection, prepared: PreparedRequest, begun: float, due_s: float | None = None
) -> RequestResult:
    """Send one request and read its answer to the end; whatever happens becomes a `RequestResult`.

    `begun` is the start of the run on `time.perf_counter`; `due_s` takes the place of the time that
    the request was prepared for.
    """
    answer, fault, detail = StreamParser(), "", ""
    sent = time.perf_counter()
    try:
        fault, detail = await _read(line, prepared.body, answer)
    except Exception as error:  # noqa: BLE001 - what is our own fault goes on
        fault, detail = _cause(error)
    end = time.perf_counter()
    if not fault and answer.error:
        fault, detail = "error in the stream", answer.error
    elif not fault and not (answer.is_complete and answer.times_s):
        fault = "cut off" if answer.times_s else "no token"
        detail = f"{answer.tokens} tokens came, and the end of the stream was {_told(answer)}"
    marks = [sent, *answer.times_s]
    counts = tuple(answer.token_counts)
    return RequestResult(
        index=prepared.request_index,
        scheduled_s=prepared.scheduled_s if due_s is None else due_s,
        sent_s=sent - begun,
        end_s=end - begun,
        requested_prompt_tokens=prepared.prompt_tokens,
        requested_output_tokens=prepared.output_tokens,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.tokens,
        cached_tokens=answer.cached_tokens,
        chunk_gaps_us=_steps_us(marks),
        chunk_tokens=() if all(count == 1 for count in counts) else counts,
        finish_reason=answer.finish_reason,
        error=fault,
        error_detail=detail,
        answer_hash=answer.answer_hash,
        output=answer.content if line.keep_answers else None,
    )


def _steps_us(marks: list[float]) -> tuple[int, ...]:
    """Return distances in whole microseconds that add up to the whole without drifting."""
    whole = [round((mark - marks[0]) * 1e6) for mark in marks]
    return tuple(after - before for before, after in pairwise(whole))


def _told(answer: StreamParser) -> str:
    return "told" if answer.is_complete else "not told"


async def _read(line: ServerConnection, body: bytes, answer: StreamParser) -> tuple[str, str]:
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
        return extract_error_message(msgspec.json.decode(data))[:_SHOWN]
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
