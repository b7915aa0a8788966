"""A small OpenAI-compatible server that keeps what it was asked and when it wrote each token."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from aiohttp import web


class Written(NamedTuple):
    """One answer from the server's side."""

    body: dict[str, Any]
    headers: dict[str, str]
    came_s: float
    times_s: list[float]


class FakeServer:
    """Answers every prompt with tokens that only the prompt decides."""

    def __init__(self) -> None:
        self.written: list[Written] = []
        self.url = ""
        self.gap_s = 0.0
        self.first_s = 0.0
        self.each = 1
        """Tokens of one event."""
        self.fault = ""
        self.fault_every = 1
        self.tells_counts = True
        self.knows_ids = True
        self.tokenizes = True
        self.bytewise = False
        self.open = 0
        self.most_open = 0
        self.asked = 0

    def answer_to(self, prompt: object, count: int) -> list[int]:
        """Return the tokens that a prompt gets."""
        start = crc32(msgspec.json.encode(prompt))
        return [(start + 7919 * number) % 50_000 for number in range(count)]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        row = {"id": "fake", "owned_by": "tests", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [row, {"id": "other"}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1.2"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.json_response({"error": "not found"}, status=404)
        body = await request.json()
        chat = "messages" in body
        count = (
            self.count(body["messages"][0]["content"]) + 5 if chat else self.count(body["prompt"])
        )
        return web.json_response({"count": count, "tokens": []})

    def count(self, text: str) -> int:
        """Words of up to four letters are one token, longer ones two; or each letter is one."""
        if self.bytewise:
            return len(text)
        return sum(1 + (len(word) > 4) for word in text.split())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        said = Written(body, dict(request.headers), time.perf_counter(), [])
        self.written.append(said)
        self.asked += 1
        fault = self.fault if self.asked % self.fault_every == 0 else ""
        if fault == "busy":
            error = {"error": {"message": "too many requests", "code": 429}}
            return web.json_response(error, status=429)
        if fault == "whole":
            return web.json_response({"choices": [{"text": "all at once"}]})
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._stream(request, said, fault)
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request, said: Written, fault: str) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        body = said.body
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        read = self.count(prompt) + 5 * chat if isinstance(prompt, str) else len(prompt)
        exact = body.get("ignore_eos", False)
        tokens = self.answer_to(prompt, body["max_tokens"] if exact else 2)
        usage = {"prompt_tokens": read, "prompt_tokens_details": {"cached_tokens": read // 4}}
        if chat:
            await self._write(reply, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
                              | self._usage(usage, 0))  # fmt: skip
        await asyncio.sleep(self.first_s)
        for at in range(0, len(tokens), self.each):
            some = tokens[at : at + self.each]
            text = "".join(f" {token}" for token in some)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if body.get("return_token_ids") and self.knows_ids:
                choice["token_ids"] = some
            said.times_s.append(time.perf_counter())
            event = {"choices": [choice]} | self._usage(usage, at + len(some))
            await self._write(reply, event)
            await asyncio.sleep(self.gap_s)
            if fault == "cut":
                assert request.transport is not None
                request.transport.abort()
                return reply
            if fault == "error":
                await self._write(reply, {"error": {"message": "the engine died"}})
                return reply
            if fault == "hang":
                await asyncio.sleep(60)
        await self._write(reply, {"choices": [{"text": "", "finish_reason": "length"}]}
                          | self._usage(usage, len(tokens)))  # fmt: skip
        await self._write(
            reply, {"choices": [], "usage": usage | {"completion_tokens": len(tokens)}}
        )
        await reply.write(b": a comment\n\ndata: [DONE]\n\n")
        await reply.write_eof()
        return reply

    def _usage(self, usage: dict[str, Any], count: int) -> dict[str, Any]:
        return {"usage": usage | {"completion_tokens": count}} if self.tells_counts else {}

    @staticmethod
    async def _write(reply: web.StreamResponse, event: dict[str, Any]) -> None:
        await reply.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


@contextmanager
def serving() -> Iterator[FakeServer]:
    """Run a fake server in a thread of its own."""
    fake, ready, loop = FakeServer(), threading.Event(), asyncio.new_event_loop()

    async def begin() -> web.AppRunner:
        runner = web.AppRunner(
            fake.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        host, port = runner.addresses[0]
        fake.url = f"http://{host}:{port}"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(begin())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
