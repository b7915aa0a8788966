"""Requests as bytes on a socket, for what no well-behaved client would send."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Got(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        told: dict[str, Any] = self.json["error"]
        return told


def send(
    url: str,
    path: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
) -> Got:
    """Send a body, as JSON unless it is bytes, and return the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    place = urlsplit(url)
    with closing(http.client.HTTPConnection(str(place.hostname), place.port, timeout=30)) as line:
        told = {} if body is None else {"content-type": "application/json"}
        line.request(
            method or ("GET" if body is None else "POST"),
            path,
            None if body is None else data,
            {**told, **(headers or {})},
        )
        answer = line.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Got(answer.status, named, answer.read())


@contextmanager
def opened(url: str, path: str, body: object) -> Iterator[socket.socket]:
    """Send a request and hand out the socket that its answer comes on."""
    place = urlsplit(url)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((str(place.hostname), place.port or 80), timeout=30) as line:
        line.sendall(head.encode() + data)
        yield line


def events(body: bytes) -> list[Any]:
    """Return the events of a stream, which must end as the API says."""
    lines = body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
