"""`PageServer`: serves pages that are made when somebody asks, with bounds on who waits.

A connection that has not sent its whole request is one of few: where another comes, the oldest of
them is closed. So clients that open connections and say nothing hold neither threads nor others.
"""

import io
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from meshwright.http_pages.allowed_hosts import AllowedHosts

MAX_WAITING = 64
"""Connections whose request is not there yet."""
MAX_ANSWERING = 64
"""Requests that are answered at a time."""
REQUEST_TIMEOUT_S = 10.0
"""How long a client may take to send its request."""
ANSWER_TIMEOUT_S = 60.0
"""How long a client may take to read an answer."""
_MAX_REQUEST_BYTES = 64 * 1024
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer: a page runs no scripts, loads nothing and stands in no frame."""


class PageRequest(NamedTuple):
    """What a client asks for."""

    path: str
    """Path without the query."""
    headers: Message


class Page(NamedTuple):
    """What a client is answered."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


class PageServer(ThreadingHTTPServer):
    """Answers GET and HEAD by a function, once `serve_forever` is called."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        answer: Callable[[PageRequest], Page],
        allowed_hosts: AllowedHosts,
        *,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
        max_answering: int = MAX_ANSWERING,
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.answer, self.allowed_hosts = answer, allowed_hosts
        self.request_timeout_s, self._max_waiting = request_timeout_s, max_waiting
        self._waiting: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.answering = threading.BoundedSemaphore(max_answering)
        """Held by each request that is answered."""
        super().__init__(address, _PageHandler)

    @property
    def num_waiting(self) -> int:
        """Connections whose request is not there yet."""
        return len(self._waiting)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection; where too many wait the one that waits longest goes."""
        with self._lock:
            if len(self._waiting) >= self._max_waiting:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._waiting[request] = None
        super().process_request(request, client_address)

    def end_waiting(self, connection: socket.socket) -> None:
        """Note that a connection's request is there, or that the connection has ended."""
        with self._lock:
            self._waiting.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.end_waiting(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no error of the server."""


class _PageHandler(BaseHTTPRequestHandler):
    """One connection, which has one request."""

    server: PageServer
    server_version, sys_version = "meshwright", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        reader = _DeadlineReader(self.connection, self.server.request_timeout_s)
        self.rfile = io.BufferedReader(reader)

    def do_GET(self) -> None:
        """Answer with a page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with the head of a page."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        server = self.server
        server.end_waiting(self.connection)
        self.connection.settimeout(ANSWER_TIMEOUT_S)
        if not server.answering.acquire(blocking=False):
            page = Page(b"too many requests at a time\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
            self._send(page, with_body=with_body)
            return
        try:
            if server.allowed_hosts.is_allowed(self.headers.get("Host")):
                path = self.path.partition("?")[0]
                page = server.answer(PageRequest(path, self.headers))
            else:
                told = b"this name of the host is not answered: --allowed-hosts NAME allows it\n"
                page = Page(told, status=HTTPStatus.FORBIDDEN)
            self._send(page, with_body=with_body)
        finally:
            server.answering.release()

    def _send(self, page: Page, *, with_body: bool) -> None:
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def send_error(self, code: int, *_: object) -> None:
        """Refuse a request, without repeating anything that it said."""
        status = HTTPStatus(code)
        self._send(Page(f"{status.phrase}\n".encode(), status=status), with_body=True)

    def end_headers(self) -> None:
        """End the head of an answer, an error's too."""
        for name, value in SECURITY_HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Say nothing: headers and addresses are nobody's business."""


class _DeadlineReader(io.RawIOBase):
    """Reads a request that has to be there in time, and to be small."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__()
        self._connection, self._until = connection, time.monotonic() + timeout_s
        self._left = _MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0 or self._left <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        size = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= size
        return size
