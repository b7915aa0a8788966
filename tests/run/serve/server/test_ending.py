"""Addresses are taken before anything listens, and servers end in order."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshwright.errors import MissingDependency
from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.run.serve.server.http_server import bind_socket
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.serving import HELLO, TEXT, serving, until
from tests.run.serve.server.wire import opened, send


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
    with serving(shutdown_timeout_s=0.1) as (served, engine):
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


def test_an_address_is_one_servers_from_before_it_listens() -> None:
    (first,) = bind_socket(ServerConfig(model="parrot", port=0))
    with first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(MissingDependency, match=f"{port}: Address already in use"):
            bind_socket(ServerConfig(model="parrot", port=port))


def test_a_server_may_follow_another_at_once(served: BackgroundServer) -> None:
    engine, port = PretendEngine(), 0
    for _ in range(3):
        settings = ServerConfig(model="parrot", port=port, access_log=False)
        with BackgroundServer(create_app(engine, Bytes(), settings), settings) as one:
            port = int(one.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as asking:
                asking.sendall(
                    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                )
                # The server closes first, so that it is its side that the system remembers.
                while asking.recv(1 << 16):
                    pass
    assert port != int(served.url.rpartition(":")[2])


def test_a_taken_address_is_named(served: BackgroundServer) -> None:
    port = int(served.url.rpartition(":")[2])
    settings = ServerConfig(model="parrot", port=port)
    another = BackgroundServer(create_app(PretendEngine(), Bytes(), settings), settings)
    with pytest.raises(MissingDependency, match=str(port)):
        another.__enter__()


def run_apart(*engine: str) -> tuple[subprocess.Popen[str], str]:
    """Run a server in a process of its own; return it with its address."""
    code = (
        "from meshwright.run.serve.server import *\n"
        "from tests.run.serve.server.pretend import *\n"
        "s = ServerConfig(model='parrot', port=0)\n"
        "engine = PretendEngine()\n"
        f"{''.join(engine)}\n"
        "app = create_app(engine, Bytes(), s)\n"
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


def test_more_clients_than_files_to_begin_with_are_answered() -> None:
    few = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    )
    process, url = run_apart(few)
    with ExitStack() as held:
        lines = [held.enter_context(opened(url, TEXT, HELLO)) for _ in range(100)]
        assert all(b"200 OK" in line.recv(65536) for line in lines)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)


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
