import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.run.serve.interface import EngineBroken
from meshwright.run.serve.routed import Routed
from meshwright.run.serve.server import Served, ServerSettings, serve_app
from meshwright.run.serve.server.keys import read_keys
from meshwright.run.serve.server.running import take_address
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.wire import opened, send

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = {"prompt": "hello"}
LONG = {"prompt": "x" * 3000, "max_tokens": 900, "stream": True}


@contextmanager
def serving(**told: Any) -> Iterator[tuple[Served, PretendEngine]]:
    """Serve with some settings."""
    engine = PretendEngine()
    settings = ServerSettings(**{"model": "parrot", "port": 0, "drain_s": 5.0, **told})
    with Served(serve_app(engine, Bytes(), settings), settings) as served:
        yield served, engine


def until(true: Callable[[], object]) -> None:
    """Wait for something that must happen."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


def test_keys_are_asked_for_and_name_who_asks(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may\nann: 0123456789\nbob: abcdefghij\n")
    with serving(keys_file=file) as (served, engine):
        got = send(served.url, TEXT, HELLO)
        assert (got.status, got.headers["www-authenticate"]) == (401, "Bearer")
        assert got.error["code"] == "invalid_api_key"
        for wrong in ("Bearer 012345678", "Bearer ", "Basic 0123456789", "0123456789", "Bearer é"):
            headers = {"authorization": wrong}
            assert send(served.url, TEXT, HELLO, headers=headers).status == 401
        key = {"authorization": "Bearer abcdefghij"}
        assert send(served.url, TEXT, {**HELLO, "user": "eve"}, headers=key).status == 200
        # Whoever has a key is one tenant, whatever users it names.
        assert engine.asked[-1].tenant == "bob"
        assert send(served.url, "/v1/models").status == 401
        assert send(served.url, "/v1/models", headers=key).status == 200
        # A key is asked for before a body is read.
        assert send(served.url, TEXT, b"{").status == 401
        assert send(served.url, "/health").status == 200


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEYS", "0123456789, carl: abcdefghij")
    keys = read_keys(None, "SOME_KEYS")
    assert len(keys) == 2
    assert keys.holder("bearer abcdefghij") == "carl"
    assert keys.holder("Bearer 0123456789") == "key0"
    assert keys.holder("Bearer 0123456780") is None


@pytest.mark.parametrize("text", ["", "# none\n", "ann: short\n", "ann: two words here\n"])
def test_a_file_without_good_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_keys(file, "NO_KEYS")
    assert "short" not in str(caught.value).replace("a key needs", "")
    with pytest.raises(InputError, match="cannot be read"):
        read_keys(tmp_path / "none", "NO_KEYS")


def test_what_changes_the_engine_needs_an_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (served, engine):
        assert send(served.url, "/sleep", {}).status == 403
        assert not engine.sleeps
    monkeypatch.setenv("MESHWRIGHT_ADMIN_KEYS", "root: 0123456789")
    with serving() as (served, engine):
        assert send(served.url, "/sleep", {}).status == 401
        key = {"authorization": "Bearer 0123456789"}
        assert send(served.url, "/sleep", b"", headers=key).json == {"is_sleeping": True}
        assert send(served.url, "/is_sleeping").json == {"is_sleeping": True}
        assert send(served.url, TEXT, HELLO).error["code"] == "asleep"
        assert send(served.url, "/wake_up", {}, headers=key).json == {"is_sleeping": False}
        assert send(served.url, TEXT, HELLO).status == 200
        assert send(served.url, "/update_weights", {"path": "new"}, headers=key).status == 200
        assert engine.path == "new"
        got = send(served.url, "/update_weights", {"path": "nowhere"}, headers=key)
        assert (got.status, got.error["param"]) == (400, "path")


def test_a_key_for_asking_changes_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_ADMIN_KEYS", "root: 0123456789")
    monkeypatch.setenv("MESHWRIGHT_API_KEYS", "ann: 9876543210")
    with serving() as (served, engine):
        codes = {
            key: send(served.url, "/sleep", {}, headers={"authorization": f"Bearer {key}"}).status
            for key in ("9876543210", "neither-of-them")
        }
        assert codes == {"9876543210": 403, "neither-of-them": 401}
        assert not engine.sleeps


def test_an_admin_may_be_anybody_where_that_is_wanted() -> None:
    with serving(admin=True) as (served, _):
        assert send(served.url, "/sleep", {"level": 2}).status == 200
        assert send(served.url, "/sleep", {"level": 3}).error["param"] == "level"


def test_a_change_that_cannot_be_made_is_told() -> None:
    class Busy(PretendEngine):
        async def sleep(self, level: int) -> None:
            raise InputError([Problem("engine", f"cannot sleep, not even {level}")])

        async def wake(self) -> None:
            raise EngineBroken("it is dead")

    engine = Busy()
    settings = ServerSettings(model="parrot", port=0, admin=True, access_log=False)
    with Served(serve_app(engine, Bytes(), settings), settings) as served:
        got = send(served.url, "/sleep", {})
        assert (got.status, got.error["param"]) == (400, "engine")
        got = send(served.url, "/wake_up", {})
        assert (got.status, got.error["message"]) == (503, "it is dead")


def test_several_engines_change_together() -> None:
    engines = [PretendEngine(), PretendEngine()]
    settings = ServerSettings(model="parrot", port=0, admin=True, access_log=False)
    with Served(serve_app(Routed(engines), Bytes(), settings), settings) as served:
        assert send(served.url, "/sleep", {}).json == {"is_sleeping": True}
        assert all(engine.sleeps for engine in engines)
        assert send(served.url, TEXT, HELLO).error["code"] == "asleep"
        assert send(served.url, "/wake_up", {}).json == {"is_sleeping": False}
        assert send(served.url, "/update_weights", {"path": "new"}).status == 200
        assert [engine.path for engine in engines] == ["new", "new"]


def test_large_bodies_are_refused() -> None:
    with serving(body_bytes=1000) as (served, _):
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


def test_other_types_than_json_are_refused(served: Served) -> None:
    got = send(served.url, TEXT, HELLO, headers={"content-type": "text/plain"})
    assert (got.status, got.error["code"]) == (415, "wrong_content_type")


def test_slow_answers_are_ended() -> None:
    with serving(request_s=0.2) as (served, engine):
        engine.held = True
        got = send(served.url, TEXT, HELLO)
        assert (got.status, got.error["code"]) == (504, "timeout")
        until(lambda: engine.left)
        assert not engine.running


def test_slow_bodies_are_not_waited_for() -> None:
    with serving(body_s=0.05) as (served, _):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        place = urlsplit(served.url)
        with socket.create_connection((str(place.hostname), place.port or 0), timeout=30) as slow:
            slow.sendall(head)
            assert b"408 Request Timeout" in slow.recv(100)


def test_a_stream_that_takes_too_long_says_so() -> None:
    with serving(request_s=0.8) as (served, engine):
        engine.holds_at = 3
        with opened(served.url, TEXT, LONG) as line:
            assert b"200 OK" in line.recv(100)
            rest = b""
            while b"[DONE]" not in rest:
                rest += line.recv(65536)
        assert b'"code":"timeout"' in rest
        until(lambda: engine.left)


def test_too_many_who_wait_are_told_to_come_back() -> None:
    with serving(waiting=3) as (served, engine), ExitStack() as open_ones:
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


def test_a_server_that_ends_lets_streams_end_first() -> None:
    with serving() as (served, engine):
        asked = {"prompt": "x" * 50, "max_tokens": 40, "stream": True}
        engine.held = True
        with opened(served.url, TEXT, asked) as line:
            until(lambda: engine.running)
            served.drain()
            until(lambda: send(served.url, "/health").status == 503)
            assert send(served.url, "/health").json["status"] == "draining"
            got = send(served.url, TEXT, HELLO)
            assert (got.status, got.error["code"]) == (503, "draining")
            engine.held = False
            rest = b""
            while b"[DONE]" not in rest:
                rest += line.recv(65536)
            assert b'"finish_reason":"length"' in rest
        served.wait()
        assert engine.closed


def test_a_stream_that_outlasts_the_drain_is_told() -> None:
    with serving(drain_s=0.1) as (served, engine):
        with opened(served.url, TEXT, {**HELLO, "stream": True, "max_tokens": 3}) as line:
            until(lambda: engine.asked)
            engine.held = True
            with opened(served.url, TEXT, HELLO) as another:
                until(lambda: len(engine.asked) == 2)
                served.drain()
                answer = another.recv(65536)
                assert b"503 Service" in answer
                assert b'"code":"draining"' in answer + another.recv(65536)
            assert line.recv(65536)
        served.wait()
        assert engine.closed


def test_an_engine_that_stands_still_is_not_healthy(
    engine: PretendEngine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send(served.url, "/health").json == {"status": "ok", "reason": ""}
    assert send(served.url, "/ping").status == 200
    monkeypatch.setattr(engine, "reason", "no step for 31 s")
    got = send(served.url, "/health")
    assert (got.status, got.json["reason"]) == (503, "no step for 31 s")
    got = send(served.url, TEXT, HELLO)
    assert (got.status, got.error["code"]) == (503, "ill")


def test_the_access_log_holds_no_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: 0123456789\n")
    with caplog.at_level(logging.INFO, "meshwright.access"), serving(keys_file=file) as (served, _):
        headers = {"authorization": "Bearer 0123456789", "x-request-id": "mine-1"}
        path = f"{TEXT}?api_key=0123456789"
        got = send(served.url, path, {"prompt": "private"}, headers=headers)
        assert got.headers["x-request-id"] == "mine-1"
        assert got.json["id"] == "cmpl-mine-1"
        got = send(served.url, "/hidden-0123456789", headers={"x-request-id": "two\twords"})
        assert len(got.headers["x-request-id"]) == 24
    lines = [json.loads(record.message) for record in caplog.records]
    assert "0123456789" not in caplog.text
    assert "private" not in caplog.text
    assert lines[0]["key"] == "ann"
    assert (lines[0]["path"], lines[0]["status"]) == (TEXT, 200)
    assert (lines[0]["prompt_tokens"], lines[0]["output_tokens"]) == (8, 9)
    assert (lines[1]["path"], lines[1]["status"]) == ("other", 404)


def test_browsers_may_call_from_where_they_are_let(served: Served) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert send(served.url, TEXT, method="OPTIONS", headers=asked).status == 405
    with serving(origins=("https://a.example",)) as (open_one, _):
        got = send(open_one.url, TEXT, method="OPTIONS", headers=asked)
        assert got.headers["access-control-allow-origin"] == "https://a.example"
        asked["origin"] = "https://b.example"
        assert send(open_one.url, TEXT, method="OPTIONS", headers=asked).status == 400


@pytest.mark.parametrize(
    "told",
    [
        {"model": ""}, {"port": -1}, {"waiting": 0}, {"request_s": 0}, {"choices": 1000},
        {"adapters": ("parrot",)}, {"adapters": ("polly", "polly")}, {"also_called": ("parrot",)},
        {"adapters": ("bird",), "also_called": ("bird",)},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(told))):
        ServerSettings(**{"model": "parrot", **told})


def test_settings_can_be_written_down_and_read_again() -> None:
    settings = ServerSettings(model="parrot", keys_file=Path("keys"))
    plain = msgspec.to_builtins(settings, enc_hook=str)
    again = msgspec.convert(plain, ServerSettings, dec_hook=lambda kind, text: kind(text))
    assert again == settings


def test_an_address_is_one_servers_from_before_it_listens() -> None:
    (first,) = take_address(ServerSettings(model="parrot", port=0))
    with first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(MissingPart, match=f"{port}: Address already in use"):
            take_address(ServerSettings(model="parrot", port=port))


def test_a_server_may_follow_another_at_once(served: Served) -> None:
    engine, port = PretendEngine(), 0
    for _ in range(3):
        settings = ServerSettings(model="parrot", port=port, access_log=False)
        with Served(serve_app(engine, Bytes(), settings), settings) as one:
            port = int(one.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as asking:
                asking.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                # The server closes first, so that it is its side that the system remembers.
                while asking.recv(1 << 16):
                    pass
    assert port != int(served.url.rpartition(":")[2])


def test_a_taken_address_is_named(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    settings = ServerSettings(model="parrot", port=port)
    another = Served(serve_app(PretendEngine(), Bytes(), settings), settings)
    with pytest.raises(MissingPart, match=str(port)):
        another.__enter__()


def run_apart(*engine: str) -> tuple[subprocess.Popen[str], str]:
    """Run a server in a process of its own; return it with its address."""
    code = (
        "from meshwright.run.serve.server import *\n"
        "from tests.run.serve.server.pretend import *\n"
        "s = ServerSettings(model='parrot', port=0)\n"
        "engine = PretendEngine()\n"
        f"{''.join(engine)}\n"
        "app = serve_app(engine, Bytes(), s)\n"
        "run_server(app, s, started=lambda url: print(url, flush=True))\n"
        "print('in order', engine.closed)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[4],
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_signal_ends_the_process_in_order() -> None:
    process, url = run_apart()
    assert send(url, "/health").status == 200
    os.kill(process.pid, signal.SIGTERM)
    said, logged = process.communicate(timeout=30)
    assert (process.returncode, said.strip()) == (0, "in order True")
    # A line for each request, and nothing else.
    assert [json.loads(line)["path"] for line in logged.splitlines()] == ["/health"]


@pytest.mark.parametrize("signals", [2, 3])
def test_more_signals_end_what_is_under_way_and_show_no_traceback(signals: int) -> None:
    process, url = run_apart("engine.holds_at = 1")
    with opened(url, TEXT, {**HELLO, "stream": True}) as line:
        assert b"200 OK" in line.recv(65536)
        for _ in range(signals):
            os.kill(process.pid, signal.SIGTERM)
            # Signals of one kind that come at the same time are one.
            time.sleep(0.02)
        said, logged = process.communicate(timeout=30)
        if signals == 2:
            rest = b"".join(iter(lambda: line.recv(65536), b""))
            assert b'"code":"draining"' in rest
    assert (process.returncode, said.strip()) == (0, "in order True")
    assert "Traceback" not in logged
