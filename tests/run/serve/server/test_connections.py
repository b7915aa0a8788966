"""What clients hold of a server by doing nothing: little, and not for long."""

import json
import re
import socket
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from meshwright.run.serve.server import BackgroundServer, http_server
from tests.run.serve.server.serving import LONG, TEXT, serving, until
from tests.run.serve.server.wire import send

BEGUN = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def connected(served: BackgroundServer, *, room: int | None = None) -> socket.socket:
    """Return a connection whose client has so little room for what it does not read."""
    line = socket.socket()
    line.settimeout(30)
    if room is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    place = urlsplit(served.url)
    line.connect((place.hostname, place.port))
    return line


def rest(line: socket.socket) -> bytes:
    parts = []
    while part := line.recv(65536):
        parts.append(part)
    return b"".join(parts)


def asked(body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def alone(served: BackgroundServer) -> bool:
    """Tell whether whoever asks for the figures is the only one under way."""
    page = send(served.url, "/metrics").body
    return re.search(rb"requests_in_progress\{.*\} 1\.0", page) is not None


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    unread = {**LONG, "n": 16, "logprobs": 5}
    with serving(write_timeout_s=0.3) as (served, engine):
        with closing(connected(served, room=4096)) as line:
            line.sendall(asked(unread))
            until(lambda: engine.asked)
            until(lambda: alone(served))
        assert send(served.url, TEXT, {"prompt": "a"}).status == 200


def test_an_answer_that_is_read_slowly_goes_on() -> None:
    with serving(write_timeout_s=0.3) as (served, _), closing(connected(served, room=4096)) as line:
        line.sendall(asked({**LONG, "n": 4, "logprobs": 5}))
        got = b""
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            got += line.recv(2048)
            time.sleep(0.01)
        while b"[DONE]" not in got[-100:]:
            got += line.recv(65536)
        assert b"200 OK" in got[:100]


@pytest.mark.parametrize("sent", [b"", b"GET /he", BEGUN, b"\r\n\r\n"], ids=repr)
def test_a_head_that_does_not_end_is_not_waited_for(sent: bytes) -> None:
    with serving(header_timeout_s=0.2) as (served, _), closing(connected(served)) as line:
        line.sendall(sent)
        assert rest(line) == b""


@pytest.mark.parametrize("sent", [b"\r\n", b"GET /he"], ids=repr)
def test_nor_is_that_of_a_second_request(sent: bytes) -> None:
    with serving(header_timeout_s=0.2) as (served, _), closing(connected(served)) as line:
        line.sendall(BEGUN + b"\r\n")
        assert b"200 OK" in line.recv(4096)
        line.sendall(sent)
        assert rest(line) == b""


def test_a_head_behind_a_request_that_is_answered_does_not_end_that() -> None:
    with serving(header_timeout_s=0.1) as (served, engine), closing(connected(served)) as line:
        engine.held = True
        line.sendall(asked({"prompt": "hello"}) + b"GET /he")
        until(lambda: engine.running)
        time.sleep(0.4)
        engine.held = False
        got = line.recv(4096)
        assert b"200 OK" in got
        assert b">hello" in got


@pytest.mark.parametrize("sent", [b"GET /", BEGUN + b"x-long: ", BEGUN + b"x: y\r\n"], ids=repr)
def test_a_head_without_end_is_refused(sent: bytes) -> None:
    with serving(max_header_bytes=1000) as (served, _), closing(connected(served)) as line:
        line.sendall(sent)
        line.sendall(b"x" * 1001)
        got = rest(line)
        assert got.startswith(b"HTTP/1.1 431 ")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("piece", [None, 700], ids=["at once", "in pieces"])
@pytest.mark.parametrize("more", [0, 1, 500, 20_000, 200_000])
def test_a_head_is_measured_exactly(more: int, piece: int | None) -> None:
    begin, end = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", b"\r\n\r\n"
    with serving(max_header_bytes=8000) as (served, _), closing(connected(served)) as line:
        head = begin + b"a" * (8000 + more - len(begin) - len(end)) + end
        for at in range(0, len(head), piece or len(head)):
            try:
                line.sendall(head[at : at + (piece or len(head))])
            except OSError:
                break  # it was refused before all was sent
        assert int(line.recv(4096).split(b" ", 2)[1]) == (431 if more else 200)


def test_many_short_headers_are_a_long_head() -> None:
    with serving(max_header_bytes=8000) as (served, _), closing(connected(served)) as line:
        line.sendall(BEGUN + b"a: b\r\n" * 2000 + b"\r\n")
        got = rest(line)
        assert got.startswith(b"HTTP/1.1 431 ")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_bodies_are_not_counted_as_heads() -> None:
    with serving(max_header_bytes=1000) as (served, _), closing(connected(served)) as line:
        for _ in range(3):
            line.sendall(asked({"prompt": "x" * 2000, "max_tokens": 1}))
            assert b"200 OK" in line.recv(4096)


@pytest.mark.parametrize("asks", [b"Upgrade: h2c", b"upgrade: websocket"], ids=repr)
def test_who_asks_for_another_protocol_is_answered_in_this_one(asks: bytes) -> None:
    wish = (
        b"\r\nConnection: Upgrade, HTTP2-Settings\r\n" + asks + b"\r\nHTTP2-Settings: AAMAAABk\r\n"
    )
    with serving() as (served, _), closing(connected(served)) as line:
        for text in ("hello", "there"):
            line.sendall(asked({"prompt": text}).replace(b"\r\n", wish, 1))
            got = line.recv(4096)
            assert b"200 OK" in got
            assert f">{text}".encode() in got


@pytest.mark.parametrize("told", [{}, {"max_body_bytes": 100_000}], ids=["wrong key", "too large"])
def test_who_is_refused_before_its_body_has_come_may_send_the_rest(
    told: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "secret-key-of-mine" if not told else "")
    sent = asked({"prompt": "\r\nUpgrade: " + "x" * 300_000})
    with serving(max_header_bytes=1000, **told) as (served, _), closing(connected(served)) as line:
        got = b""
        for begin in range(0, len(sent), 50_000):
            line.sendall(sent[begin : begin + 50_000])
            got += line.recv(4096) if not got else b""
            time.sleep(0.02)
        assert got.startswith(b"HTTP/1.1 401 " if not told else b"HTTP/1.1 413 ")
        line.sendall(BEGUN + b"\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 200 "), "the connection is there still"


def test_a_refused_body_without_end_is_not_waited_for() -> None:
    with (
        serving(max_body_bytes=10, body_timeout_s=0.3) as (served, _),
        closing(connected(served)) as line,
    ):
        line.sendall(asked({"prompt": "x" * 1000})[:-500])
        assert line.recv(4096).startswith(b"HTTP/1.1 413 ")
        until(lambda: cannot(line, b"x"))


def cannot(line: socket.socket, send_: bytes) -> bool:
    """Try to send something; tell whether the other side has gone."""
    try:
        line.sendall(send_)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("kept", [b"keep-alive", b"close"])
def test_a_whole_answer_that_nobody_reads_holds_no_connection(kept: bytes) -> None:
    ask = asked({**LONG, "prompt": ["x" * 3000] * 6, "n": 16, "logprobs": 5, "stream": False})
    with serving(write_timeout_s=0.3) as (served, engine):
        connections = served._server.server_state.connections
        with closing(connected(served, room=4096)) as line:
            line.sendall(ask.replace(b"\r\n", b"\r\nconnection: " + kept + b"\r\n", 1))
            until(lambda: engine.asked and not engine.running)
            until(lambda: not connections)
            until(lambda: cannot(line, b"x"))
            assert cannot(line, b"x"), "it was let go of"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_reads_little_but_steadily_is_not_cut_off(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.3)
    prompts = ["x" * 3000] * (1 if stream else 6)  # streams say everything by many more words
    ask = {**LONG, "prompt": prompts, "n": 16, "logprobs": 5, "stream": stream}
    with (
        serving(write_timeout_s=0.5) as (served, engine),
        closing(connected(served, room=4096)) as line,
    ):
        line.sendall(asked(ask))
        got = line.recv(1024)
        until(lambda: stream or not engine.running)
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s:
            got += line.recv(2048)
            time.sleep(0.02)
        while not got.endswith(b"[DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}}"):
            part = line.recv(65536)
            assert part, "it was cut off"
            got += part
        assert len(got) > 4_000_000
