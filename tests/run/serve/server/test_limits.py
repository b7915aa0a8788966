"""What a server refuses, ends, or is told to wait for."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.run.serve.server import BackgroundServer, ServerConfig
from tests.run.serve.server.pretend import PretendEngine
from tests.run.serve.server.serving import HELLO, LONG, TEXT, serving, until
from tests.run.serve.server.wire import opened, send

CHAT = "/v1/chat/completions"


def test_large_bodies_are_refused() -> None:
    with serving(max_body_bytes=1000) as (served, _):
        got = send(served.url, TEXT, {"prompt": "a" * 2000})
        assert (got.status, got.error["code"]) == (413, "body_too_large")

        def parts() -> Iterator[bytes]:
            yield b"x" * 600
            yield b"x" * 600

        headers = {"transfer-encoding": "chunked", "content-type": "application/json"}
        body: Any = parts()
        line = http.client.HTTPConnection(str(urlsplit(served.url).netloc), timeout=30)
        line.request("POST", TEXT, body, headers, encode_chunked=True)
        assert line.getresponse().status == 413
        line.close()


def test_other_types_than_json_are_refused(served: BackgroundServer) -> None:
    got = send(served.url, TEXT, HELLO, headers={"content-type": "text/plain"})
    assert (got.status, got.error["code"]) == (415, "unsupported_media_type")


def test_slow_answers_are_ended() -> None:
    with serving(request_timeout_s=0.2) as (served, engine):
        engine.held = True
        got = send(served.url, TEXT, HELLO)
        assert (got.status, got.error["code"]) == (504, "timeout")
        until(lambda: engine.left)
        assert not engine.running


def test_slow_bodies_are_not_waited_for() -> None:
    with serving(body_timeout_s=0.05) as (served, _):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
        place = urlsplit(served.url)
        with socket.create_connection((str(place.hostname), place.port or 0), timeout=30) as slow:
            slow.sendall(head)
            assert b"408 Request Timeout" in slow.recv(100)


def test_a_stream_that_takes_too_long_says_so() -> None:
    with serving(request_timeout_s=0.8) as (served, engine):
        engine.holds_at = 3
        with opened(served.url, TEXT, LONG) as line:
            assert b"200 OK" in line.recv(100)
            rest = b""
            while b"[DONE]" not in rest:
                rest += line.recv(65536)
        assert b'"code":"timeout"' in rest
        until(lambda: engine.left)


def test_too_many_who_wait_are_told_to_come_back() -> None:
    with serving(max_queued_requests=3) as (served, engine), ExitStack() as open_ones:
        engine.held = True
        for _ in range(3):
            open_ones.enter_context(opened(served.url, TEXT, HELLO))
        until(lambda: len(engine.running) == 3)
        for path, body in ((TEXT, HELLO), ("/v1/embeddings", {"input": "a"})):
            got = send(served.url, path, body)
            assert (got.status, got.error["type"]) == (429, "rate_limit_error")
            assert int(got.headers["retry-after"]) >= 1
        engine.held = False
        until(lambda: not engine.running)
        assert send(served.url, TEXT, HELLO).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ["hello", "there"]])
def test_a_client_that_leaves_is_not_answered_further(stream: bool, prompt: Any) -> None:
    with serving() as (served, engine):
        engine.held = True
        asks = 1 if isinstance(prompt, str) else len(prompt)
        with opened(served.url, TEXT, {"prompt": prompt, "stream": stream}):
            until(lambda: len(engine.running) == asks)
        until(lambda: len(engine.left) == asks)
        assert not engine.running
        page = send(served.url, "/metrics").body.decode()
        assert f'finished_reason="abort",model_name="parrot"}} {asks}.0' in page


def test_a_client_that_leaves_in_the_midst_of_a_stream_is_noticed() -> None:
    with serving() as (served, engine):
        engine.holds_at = 3
        with opened(served.url, TEXT, LONG) as line:
            assert b"200 OK" in line.recv(100)
        until(lambda: engine.left)
        assert not engine.running


def test_an_engine_that_stands_still_is_not_healthy(
    engine: PretendEngine, served: BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send(served.url, "/health").json == {"status": "ok", "reason": ""}
    assert send(served.url, "/ping").status == 200
    monkeypatch.setattr(engine, "reason", "no step for 31 s")
    got = send(served.url, "/health")
    assert (got.status, got.json["reason"]) == (503, "no step for 31 s")
    got = send(served.url, TEXT, HELLO)
    assert (got.status, got.error["code"]) == (503, "engine_unhealthy")


def test_browsers_may_call_from_where_they_are_let(served: BackgroundServer) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert send(served.url, TEXT, method="OPTIONS", headers=asked).status == 405
    with serving(allowed_origins=("https://a.example",)) as (open_one, _):
        got = send(open_one.url, TEXT, method="OPTIONS", headers=asked)
        assert got.headers["access-control-allow-origin"] == "https://a.example"
        got = send(open_one.url, "/v1/models", headers={"origin": "https://a.example"})
        assert "retry-after" in got.headers["access-control-expose-headers"]
        # As OpenAI's client in a page asks.
        asked["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
        assert send(open_one.url, TEXT, method="OPTIONS", headers=asked).status == 200
        asked["origin"] = "https://b.example"
        assert send(open_one.url, TEXT, method="OPTIONS", headers=asked).status == 400


@pytest.mark.parametrize(
    "told",
    [
        {"model": ""}, {"port": -1}, {"max_queued_requests": 0}, {"request_timeout_s": 0},
        {"max_n": 1000},
        {"lora_names": ("parrot",)}, {"lora_names": ("polly", "polly")}, {"aliases": ("parrot",)},
        {"lora_names": ("bird",), "aliases": ("bird",)},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(told))):
        ServerConfig(**{"model": "parrot", **told})


def test_settings_can_be_written_down_and_read_again() -> None:
    settings = ServerConfig(model="parrot", api_key_file=Path("keys"))
    plain = msgspec.to_builtins(settings, enc_hook=str)
    again = msgspec.convert(plain, ServerConfig, dec_hook=lambda kind, text: kind(text))
    assert again == settings
