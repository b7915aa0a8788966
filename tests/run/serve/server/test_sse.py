"""Many streams at a time: nothing lost, nothing mixed up."""

import asyncio
import json
import re
from urllib.parse import urlsplit

import pytest

from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.wire import opened


async def _stream(place: tuple[str, int], at: int) -> str:
    """Return what one stream said."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"{at}:" + chr(97 + at % 26) * (at % 40)}],
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*place)
    writer.write(head.encode() + body)
    said = ""
    done = False
    async for line in reader:
        if line.startswith(b"data: {"):
            assert not done
            choices = json.loads(line[6:])["choices"]
            said += choices[0]["delta"].get("content", "")
        done = done or line.startswith(b"data: [DONE]")
    assert done
    writer.close()
    await writer.wait_closed()
    return said


async def _all(url: str, streams: int) -> list[str]:
    place = urlsplit(url)
    where = (str(place.hostname), place.port or 0)
    return await asyncio.gather(*(_stream(where, at) for at in range(streams)))


def test_tokens_of_a_pause_are_written_together() -> None:
    engine = PretendEngine()
    settings = ServerConfig(model="parrot", port=0, stream_interval_s=0.05)
    asked = {"prompt": "x" * 300, "max_tokens": 200, "stream": True}
    with (
        BackgroundServer(create_app(engine, Bytes(), settings), settings) as served,
        opened(served.url, "/v1/completions", asked) as line,
    ):
        said = b""
        while b"[DONE]" not in said:
            said += line.recv(65536)
    assert said.count(b'"text":') == 200
    # Each write is a chunk, which begins with its size.
    assert len(re.findall(rb"\r\n[0-9a-f]+\r\ndata: ", said)) < 100


@pytest.mark.parametrize("streams", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_streams_side_by_side_keep_to_themselves(streams: int) -> None:
    engine = PretendEngine()
    settings = ServerConfig(model="parrot", port=0)
    with BackgroundServer(create_app(engine, Bytes(), settings), settings) as served:
        said = asyncio.run(_all(served.url, streams))
    for at, text in enumerate(said):
        assert text == f">user: {at}:" + chr(97 + at % 26) * (at % 40)
    assert not engine.left
    assert not engine.running
