"""Clients that ask a server for everything at once: whole answers, streams, errors, and leaving.

Every request has a name, a prompt and a user of its own, so that whatever is kept by one of them
adds up.
"""

import asyncio
import json
from collections import Counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
_STREAM_END = b"\r\n0\r\n\r\n"


class Kind(NamedTuple):
    """A kind of request, and what ought to come of it."""

    path: str
    body: dict[str, Any]
    status: int = 200
    leaves: str = ""
    """When the client goes away, where it does: `sent` or `first` (bytes of the answer)."""


STREAM = {"stream": True}
LONG = {"max_tokens": 24, "ignore_eos": True}
KINDS = (
    Kind(TEXT, {}),
    Kind(TEXT, STREAM),
    Kind(CHAT, {}),
    Kind(CHAT, STREAM),
    Kind(TEXT, {"n": 2, "temperature": 1.0}),
    Kind(TEXT, {"n": 2, "logprobs": 2} | STREAM),
    Kind(TEXT, {"logprobs": 1, "echo": True}),
    Kind(CHAT, {"logprobs": True, "top_logprobs": 2} | STREAM),
    Kind(CHAT, {"guided_choice": ["yes #", "no #"]}),
    Kind(TEXT, {"stop": ["e"], "seed": 7, "temperature": 1.0} | STREAM),
    Kind(TEXT, LONG | STREAM, leaves="first"),
    Kind(CHAT, LONG | STREAM, leaves="first"),
    Kind(TEXT, LONG, leaves="sent"),
    Kind(CHAT, LONG | STREAM, leaves="sent"),
    Kind("/v1/embeddings", {"input": "a #"}),
    Kind(TEXT, {"temperature": -1}, status=400),
    Kind("/nowhere/#", {}, status=404),
)


def written(kind: Kind, number: int) -> bytes:
    """Return the bytes of a request."""
    body: dict[str, Any] = {"max_tokens": 4, "user": "user #", "priority": number % 7}
    if kind.path == TEXT:
        body["prompt"] = "fox #"
    elif kind.path == CHAT:
        body["messages"] = [{"role": "user", "content": "dog #"}]
    else:
        body = {}
    data = json.dumps(body | kind.body).replace("#", str(number)).encode()
    head = (
        f"POST {kind.path.replace('#', str(number))} HTTP/1.1\r\nHost: localhost\r\n"
        f"X-Request-Id: soak-{number}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Client:
    """Asks one request after another, over one connection as long as it lasts."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._host, self._port = str(place.hostname), place.port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, number: int) -> str:
        """Ask; return what was wrong with the answer."""
        kind = KINDS[number % len(KINDS)]
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self._writer.write(written(kind, number))
        await self._writer.drain()
        if kind.leaves == "sent":
            await self.close()
            return ""
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split(maxsplit=2)[1])
        if kind.leaves:
            await self._reader.read(64)
            await self.close()
            return "" if status == kind.status else f"{kind.path}: {status}"
        body = await self._body(self._reader, head.lower())
        if status != kind.status:
            return f"{kind.path}: {status} {body[:200].decode(errors='replace')}"
        if kind.body.get("stream") and b"data: [DONE]" not in body:
            return f"{kind.path}: a stream without an end"
        return "an error in a stream" if b'"error"' in body and status == 200 else ""

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        _, told, rest = head.partition(b"content-length:")
        if told:
            return await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
        return await reader.readuntil(_STREAM_END)

    async def close(self) -> None:
        """Go away."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def asked(url: str, first: int, count: int, clients: int) -> Counter[str]:
    """Ask so many requests, and return what was wrong with how many."""
    wrong: Counter[str] = Counter()
    numbers = iter(range(first, first + count))

    async def one() -> None:
        client = Client(url)
        for number in numbers:
            try:
                said = await asyncio.wait_for(client.ask(number), 120)
            except (OSError, EOFError, TimeoutError) as error:
                said = f"{type(error).__name__}: {error}"
                await client.close()
            if said:
                wrong[said] += 1
        await client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return wrong
