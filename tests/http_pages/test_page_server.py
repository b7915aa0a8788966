import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from meshwright.http_pages.allowed_hosts import AllowedHosts
from meshwright.http_pages.page_server import (
    MAX_WAITING,
    SECURITY_HEADERS,
    Page,
    PageRequest,
    PageServer,
)

PAGE = b"what was asked for"


SLOW_PAGE_BEGUN, SLOW_PAGE_MAY_END = threading.Event(), threading.Event()


@contextmanager
def serving(**bounds: float) -> Iterator[PageServer]:
    def answer(request: PageRequest) -> Page:
        if request.path == "/slow":
            SLOW_PAGE_BEGUN.set()
            assert SLOW_PAGE_MAY_END.wait(20)
        return Page(PAGE)

    with PageServer(("127.0.0.1", 0), answer, AllowedHosts(), **bounds) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: PageServer, text: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(text.encode("latin-1"))
        found = b""
        while part := connection.recv(1 << 16):
            found += part
        return found


def get(server: PageServer, path: str = "/", host: str = "localhost") -> tuple[int, bytes]:
    head, _, body = ask(server, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").partition(
        b"\r\n\r\n"
    )
    return int(head.split()[1]), body


def test_a_page_is_answered_with_headers_that_confine_it() -> None:
    with serving() as server:
        answer = ask(server, "GET /a?b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert body == PAGE.decode()
    for name, value in SECURITY_HEADERS.items():
        assert f"{name}: {value}" in head
    assert "Server: meshwright" in head


def test_head_is_answered_without_a_body() -> None:
    with serving() as server:
        answer = ask(server, "HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert f"Content-Length: {len(PAGE)}".encode() in answer


def test_a_name_of_a_stranger_is_not_answered() -> None:
    with serving() as server:
        assert get(server, host="evil.example")[0] == 403
        assert PAGE not in ask(server, "GET / HTTP/1.1\r\nHost: evil.example:80\r\n\r\n")
        assert get(server)[0] == 200


def test_connections_without_a_request_hold_few_threads_and_nobody_else() -> None:
    with serving() as server, ExitStack() as stack:
        before = threading.active_count()
        for _ in range(400):
            place = ("127.0.0.1", server.server_port)
            idle = stack.enter_context(socket.create_connection(place, timeout=20))
            idle.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert get(server) == (200, PAGE)
        assert server.num_waiting <= MAX_WAITING
        # Threads of closed connections need a moment to end.
        until = time.monotonic() + 20
        while threading.active_count() > before + MAX_WAITING + 1 and time.monotonic() < until:
            time.sleep(0.02)
        assert threading.active_count() <= before + MAX_WAITING + 1


def send_slowly(connection: socket.socket) -> None:
    for _ in range(200):
        connection.sendall(b"x")
        time.sleep(0.02)


def test_a_request_that_comes_byte_by_byte_is_given_up() -> None:
    with (
        serving(request_timeout_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as slow,
    ):
        with pytest.raises(OSError):  # noqa: PT011 - a reset or a broken pipe
            send_slowly(slow)
        assert get(server)[0] == 200


def test_a_request_of_many_headers_is_given_up() -> None:
    lines = "".join(f"x-{n}: {'y' * 8000}\r\n" for n in range(20))
    with serving() as server:
        try:
            answer = ask(server, f"GET / HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n")
        except OSError:
            answer = b""
        assert PAGE not in answer
        assert get(server)[0] == 200


def test_requests_beyond_those_answered_at_a_time_are_put_off() -> None:
    with serving(max_answering=1) as server:
        other = threading.Thread(target=get, args=(server, "/slow"))
        other.start()
        assert SLOW_PAGE_BEGUN.wait(20)
        assert get(server)[0] == 503
        SLOW_PAGE_MAY_END.set()
        other.join()
        until = time.monotonic() + 20  # the place is free a moment after the answer
        while (status := get(server)[0]) != 200 and time.monotonic() < until:
            time.sleep(0.01)
        assert status == 200


@pytest.mark.parametrize(
    "text",
    [
        "GET",
        "GET /",
        "\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "<script> / HTTP/1.1\r\n\r\n",
        "\x00\x01\x02\r\n\r\n",
        "GET / HTTP/1.1 HTTP/1.1\r\n\r\n",
        "PUT /x HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\n: x\r\nHost: e\r\n\r\n",
        "CONNECT evil.example:80 HTTP/1.1\r\n\r\n",
        "GET " + "/" * 70_000 + " HTTP/1.1\r\n\r\n",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_malformed_requests_get_no_page_and_end_nothing(text: str) -> None:
    with serving(request_timeout_s=0.2) as server:
        try:
            answer = ask(server, text)
        except OSError:
            answer = b""
        assert PAGE not in answer
        assert b"<script" not in answer
        assert get(server)[0] == 200
