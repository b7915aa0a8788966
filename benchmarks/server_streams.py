"""How much a token costs the server on its way to one of many streams.

The engine has no model: it hands every stream the same piece at every step, as soon as the last
ones are written. Clients are another process that counts events. CPU time is the server's alone.
"""

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import StreamingResponse
from starlette.routing import Route

from meshwright.run.serve.client.output_stream import OutputStream
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app

NAME = "server_streams"
QUESTION = "How many tokens a second does the server pass on to 1,000 streams on one core?"

NEXT = RequestOutput(token_ids=(120,), text=" word")
LAST = RequestOutput(token_ids=(120,), text=" word", finish_reason="length")
CLIENT = r"""
import asyncio, json, sys, time
port, streams, tokens = map(int, sys.argv[1:])
body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": tokens,
                   "stream": True}).encode()
head = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
class Count(asyncio.Protocol):
    def __init__(self): self.seen, self.ended = 0, asyncio.get_running_loop().create_future()
    def connection_made(self, transport): transport.write(head + body)
    def data_received(self, data): self.seen += data.count(b'" word"')
    def connection_lost(self, error): self.ended.set_result(self.seen)
async def one():
    _, count = await asyncio.get_running_loop().create_connection(Count, "127.0.0.1", port)
    return await count.ended
async def main():
    start = time.perf_counter()
    seen = await asyncio.gather(*(one() for _ in range(streams)))
    assert set(seen) == {tokens}, set(seen)
    print(time.perf_counter() - start)
try:
    import uvloop
    uvloop.run(main())
except ImportError:
    asyncio.run(main())
"""


class Steps:
    """An engine that only counts."""

    max_model_len = max_embed_len = 1 << 20

    def __init__(self) -> None:
        self._left: dict[OutputStream, int] = {}
        self._stepping = False

    def generate(self, ask: Request) -> OutputStream:
        """Answer with as many pieces as are asked for."""
        inbox = OutputStream(1, lambda: self._left.pop(inbox))
        self._left[inbox] = ask.sampling_params.max_tokens or 1
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)
        return inbox

    def _step(self) -> None:
        left = self._left
        for inbox, tokens in list(left.items()):
            if tokens > 1:
                left[inbox] = tokens - 1
                inbox.put(NEXT)
            else:
                del left[inbox]
                inbox.put(LAST)
        self._stepping = bool(left)
        if self._stepping:
            # Whoever got a piece is ahead in the loop, and writes it before the next step.
            asyncio.get_running_loop().call_soon(self._step)

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return nothing of use."""
        del adapter
        return [[1.0] for _ in prompts]

    def stats(self) -> EngineStats:
        """Return nothing of use."""
        return EngineStats()

    def health_problem(self) -> str:
        """Be well."""
        return ""

    async def close(self) -> None:
        """Have nothing to let go of."""


class Letters:
    """A tokenizer of characters."""

    vocab_size = 256
    special_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, /, *, special: bool = True) -> list[int]:
        """Return the characters' numbers."""
        return [int(special), *text.encode()]

    def decode(self, ids: Sequence[int], /, *, skip_special: bool = True) -> str:
        """Return the characters."""
        del skip_special
        return bytes(ids).decode("latin-1")

    def token_bytes(self, token: int, /) -> bytes:
        """Return the character."""
        return chr(token).encode()

    def apply_chat_template(self, messages: Sequence[Any], tools: Any = None, **values: Any) -> str:
        """Return the last message."""
        return str(messages[-1]["content"]) + str(tools or "") + str(len(values))


def ours() -> Starlette:
    """Return our server."""
    return create_app(Steps(), Letters(), _settings())


def usual() -> Starlette:
    """Return the same stream as it is mostly written: dictionaries, json, StreamingResponse."""
    engine = Steps()

    async def events(tokens: int) -> AsyncIterator[str]:
        ask = Request(prompt_token_ids=(1,), sampling_params=SamplingParams(max_tokens=tokens))
        async for piece in engine.generate(ask):
            chunk = {
                "id": "chatcmpl-0123456789abcdef01234567",
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": "m",
                "choices": [
                    {
                        "index": piece.index,
                        "delta": {"content": piece.text},
                        "logprobs": None,
                        "finish_reason": piece.finish_reason,
                    }
                ],
            }
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def chat(request: StarletteRequest) -> StreamingResponse:
        asked = await request.json()
        return StreamingResponse(events(asked["max_tokens"]), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    app.state.desk = ours().state.desk  # what stops a server
    return app


def _settings() -> ServerConfig:
    return ServerConfig(model="m", port=0, access_log=False)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def once(make: Callable[[], Starlette], streams: int, tokens: int) -> tuple[float, float]:
    """Return microseconds of CPU for a token, and tokens a second by the clock."""
    with BackgroundServer(make(), _settings()) as served:
        port = served.url.rpartition(":")[2]
        before = _cpu_s()
        said = subprocess.run(
            [sys.executable, "-c", CLIENT, port, str(streams), str(tokens)],
            check=True,
            capture_output=True,
            text=True,
        )
        cpu_s = _cpu_s() - before
    return cpu_s / (streams * tokens) * 1e6, streams * tokens / float(said.stdout)


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    streams, tokens, rounds = (100, 20, 1) if quick else (1000, 200, 5)
    # In turns, so that what else the machine does falls on both alike.
    runs = [(once(ours, streams, tokens), once(usual, streams, tokens)) for _ in range(rounds)]
    mine = statistics.median(run[0][0] for run in runs)
    theirs = statistics.median(run[1][0] for run in runs)
    few = statistics.median(once(ours, 32, tokens * 4)[0] for _ in range(rounds))
    return {
        "figures": [
            {"name": f"CPU of a token, {streams} streams", "value": mine, "unit": "µs"},
            {"name": "tokens for a second of CPU", "value": 1e6 / mine, "unit": "tokens/s"},
            {
                "name": "tokens a second by the clock",
                "value": statistics.median(run[0][1] for run in runs),
                "unit": "tokens/s",
            },
            {"name": "CPU of a token, 32 streams", "value": few, "unit": "µs"},
        ],
        "peers": [
            {
                "name": "dictionaries, json and StreamingResponse, CPU of a token",
                "value": theirs,
                "unit": "µs",
            }
        ],
        "notes": "Server and clients on one machine over loopback; every token is an event and a "
        "write of its own. The engine, which only counts, is in the figures too.",
    }
