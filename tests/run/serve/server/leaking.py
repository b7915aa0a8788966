"""Asks a server many times in a process of its own; prints which objects there are more of.

    python -m tests.run.serve.server.leaking WARM_UP MORE

Every object of the process is counted, so nothing else may run in it.
"""

import asyncio
import gc
import json
import sys
from collections import Counter
from typing import Any

from starlette.applications import Starlette

from meshwright.run.serve.server import ServerConfig, create_app
from tests.run.serve.server.pretend import Bytes, PretendEngine

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ASKED: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/completions", {"prompt": "hello", "stream": True}),
    ("/v1/completions", {"prompt": "hello", "temperature": -1}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "leaves": True}),
    ("/v1/embeddings", {"input": "a"}),
    ("/nowhere", {}),
]


async def _ask(app: Starlette, path: str, body: dict[str, Any]) -> None:
    """Ask without a socket; a body that says so leaves after the first bytes."""
    told = dict(body)
    leaves = told.pop("leaves", False)
    sent = [json.dumps(told).encode()]
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if leaves and message["type"] == "http.response.body":
            gone.set()
            await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("here", 1),
    }
    await app(scope, receive, send)


async def grown(warm_up: int, more: int) -> dict[str, Any]:
    """Return what there is more of after some more turns, and what the server holds."""
    engine = PretendEngine()
    settings = ServerConfig(model="parrot", access_log=False)
    app = create_app(engine, Bytes(), settings)

    async def ask(times: int) -> Counter[str]:
        for _ in range(times):
            await asyncio.gather(*(_ask(app, path, body) for path, body in ASKED))
        engine.asked.clear()
        engine.left.clear()
        gc.collect()
        return Counter(type(one).__qualname__ for one in gc.get_objects())

    before = await ask(warm_up)
    after = await ask(more)
    desk = app.state.desk
    return {
        # A handful may come with the interpreter itself; what leaks comes with every turn.
        "grown": {name: count for name, count in (after - before).items() if count > more // 2},
        "held": [
            desk.admission.queued_requests,
            len(desk.admission.requests),
            desk.metrics.requests_in_progress,
        ],
        "aborted": desk.metrics.finish_reasons["abort"],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(grown(*map(int, sys.argv[1:])))))
