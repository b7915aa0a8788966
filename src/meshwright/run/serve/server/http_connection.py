"""`HttpConnection`: what a client may hold of the server by doing nothing, and HTTP/1.1 for all.

A head that comes slowly or has no end, and an answer that is not read, would each hold a
connection, and with it a request's place and memory, for as long as the client likes. Who is slow
is not idle: as long as some of an answer is read now and then, it is written.
"""

import asyncio
import contextlib
import re
import struct
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.server_config import ServerConfig

if sys.platform != "win32":
    from fcntl import ioctl
    from termios import TIOCOUTQ

_LINGER_S = 1.0
"""How long a connection stays open behind its last answer for what the client still sends."""
_REQUEST_LINE_BYTES = len("GET  HTTP/1.1\r\n\r\n")
_HEADER_EXTRA_BYTES = len(": \r\n")
_UPGRADE = re.compile(rb"(\r\n)u(pgrade:)", re.IGNORECASE)


class HttpConnection(HttpToolsProtocol):
    """A connection whose client has to send heads, and read answers, within bounds."""

    server_config: ServerConfig

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._in_head = True
        """Whether the end of a request's head is waited for."""
        self._in_body = False
        """Whether the rest of a request is."""
        self._heads = self._head_bytes = 0
        """Heads that came to their end, and bytes received of one that has not."""
        self._parsed_head_bytes = 0
        """Bytes of the head that is parsed, without spaces that mean nothing."""
        self._is_refused = False
        """Whether a head was too large: the connection is closing, and nothing else is read."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the head of the first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        _stop(self._head_timer)
        _stop(self._unread_timer)
        super().connection_lost(exc)

    # What a client sends.

    def data_received(self, data: bytes) -> None:
        """Read on, unless a head has become too long."""
        if self._closes():
            return
        heads = self._heads
        super().data_received(data if self._in_body else _staying(data))
        if self._closes():
            self._refuse_head()
        elif self._in_head:
            # What came with the end of another head is mostly no part of this one.
            self._head_bytes += len(data) if heads == self._heads else 0
            if (
                self._head_bytes > self.server_config.max_header_bytes
                and not self.transport.is_closing()
            ):
                self._refuse_head()
        elif not self._in_body and self._is_free() and self.timeout_keep_alive_task is None:
            # Empty lines before a request begin none, and must not keep a connection open; nor
            # must the end of a body that was refused before.
            self._await_head()

    def on_message_begin(self) -> None:
        """Wait for the rest of a head; that of the first request since the connection was made."""
        super().on_message_begin()
        self._parsed_head_bytes = _REQUEST_LINE_BYTES
        if not self._in_head:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count_head(len(name) + len(value) + _HEADER_EXTRA_BYTES)
        super().on_header(name, value)

    def _closes(self) -> bool:
        """Tell whether a head was refused, which parsing finds out."""
        return self._is_refused

    def _count_head(self, size: int) -> None:
        """Count a part of a head, and parse no further where that is too large."""
        self._parsed_head_bytes += size
        if self._parsed_head_bytes > self.server_config.max_header_bytes:
            self._is_refused = True
            raise ValueError("the head is too large")

    def on_headers_complete(self) -> None:
        """Begin with a request."""
        self._in_head, self._in_body = False, True
        self._heads += 1
        _stop(self._head_timer)
        if not self.flow.write_paused:
            # An answer before it may not be read to its end, to which more is added now.
            _stop(self._unread_timer)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Expect that the rest is read, and that the body of who was refused comes to its end."""
        super().on_response_complete()
        if self._in_body:
            _stop(self._head_timer)
            self._head_timer = self.loop.call_later(
                self.server_config.body_timeout_s, self._late_head
            )
        if self._is_free() and not self.flow.write_paused:
            self._await_reading()

    def _is_free(self) -> bool:
        under_way: RequestResponseCycle | None = self.cycle  # none before the first request
        return under_way is None or under_way.response_complete

    def _await_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        _stop(self._head_timer)
        self._head_timer = self.loop.call_later(
            self.server_config.header_timeout_s, self._late_head
        )

    def _late_head(self) -> None:
        if self._is_free():
            self.transport.close()
        else:
            # It is sent behind a request that is answered still, which is no reason to end that.
            self._head_timer = self.loop.call_later(
                self.server_config.header_timeout_s, self._late_head
            )

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless that is a head that was left because of its size."""
        if not self._is_refused:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        self._is_refused = True
        if not self._is_free():
            self.transport.abort()
            return
        most = self.server_config.max_header_bytes
        body = ApiError(
            431, f"The head is larger than {most} bytes", code="headers_too_large"
        ).to_json()
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # Closed at once, with bytes of the client unread, the system would take the answer back.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        _stop(self._head_timer)
        self._head_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    # What it is sent.

    def pause_writing(self) -> None:
        """Write no more until the client has read, which it has to do in time."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """Write again."""
        _stop(self._unread_timer)
        super().resume_writing()
        if self._is_free():
            self._await_reading()  # nothing follows, and what is left has to be read as well

    def timeout_keep_alive_handler(self) -> None:
        """End a connection that no further request comes on, once the last answer is read."""
        if self.transport.get_write_buffer_size() and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _await_reading(self) -> None:
        _stop(self._unread_timer)
        if self.transport.get_write_buffer_size():
            left = self._unread_bytes()
            self._unread_timer = self.loop.call_later(
                self.server_config.write_timeout_s, self._unread, left
            )

    def _unread(self, before: int) -> None:
        """Let go of a client that has read nothing; a slow one may go on."""
        if self._unread_bytes() < before:
            self._await_reading()
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Count what the client has not taken, here and in the system.

        That has megabytes, and takes more only when a third of them are read: minutes go by in
        which a slow client reads and nothing changes here.
        """
        line = self.transport.get_extra_info("socket")
        queued = 0 if line is None else _queued(line.fileno())
        return self.transport.get_write_buffer_size() + queued


def create_connection_class(settings: ServerConfig) -> type[HttpConnection]:
    """Return the connections of a server."""
    return type("ServedConnection", (HttpConnection,), {"server_config": settings})


def _staying(data: bytes) -> bytes:
    """Return the head of a request without its wish for another protocol, which clients survive.

    Those of Java ask for HTTP/2 with every request; the parser would take the body for that.
    """
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    return _UPGRADE.sub(rb"\1x\2", head) + data[len(head) :] if _UPGRADE.search(head) else data


def _queued(line: int) -> int:
    """Count what the system has of a connection and the other side has not, where it tells."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError, ValueError):  # it may be closed already
            return int(struct.unpack("i", ioctl(line, TIOCOUTQ, bytes(4)))[0])
    return 0


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
