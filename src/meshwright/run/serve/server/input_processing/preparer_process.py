"""The process that prepares requests: one at a time, with bounded memory.

It reads nothing but its socket and the files of its tokenizer. When the socket closes, whoever
started the process is gone, and it ends.
"""

import contextlib
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.run.serve.frame_codec import encode_frame
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.input_processing import protocol
from meshwright.run.serve.server.input_processing.protocol import (
    PreparationFailed,
    PreparedHead,
    PrepareRequest,
    PreparerReady,
    StartPreparing,
)
from meshwright.run.serve.server.input_processing.request_preparer import RequestPreparer
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer

LOG = logging.getLogger("meshwright.server")
MAX_GROWTH_BYTES = 2**28
"""A process that has grown by more ends behind its answer: its memory goes back to the system."""
_LENGTH_BYTES = 4


def main(descriptor: int) -> None:
    """Prepare what comes over a socket, until it closes."""
    # Ctrl-C in a terminal reaches all its processes; the server decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as line:
        threading.Thread(target=_end_with, args=(line,), daemon=True).start()
        start = protocol.decode_to_preparer(_read_frame(line))
        assert isinstance(start, StartPreparing)
        lower_priority(start.niceness)
        try:
            preparer = RequestPreparer(load_tokenizer(start.model_path), start.config)
        except MeshwrightError as error:
            _send(line, PreparationFailed(503, str(error), code="input_processor_failed"))
            return
        gc.collect()
        gc.freeze()
        limit_memory(start.memory_bytes)
        _send(line, PreparerReady())
        at_start = _resident_bytes()
        while message := _read_frame(line):
            request = protocol.decode_to_preparer(message)
            assert isinstance(request, PrepareRequest)
            body = _read_frame(line)
            answer, parts = _answer(preparer, request, body)
            del body
            grown = _resident_bytes() - at_start > MAX_GROWTH_BYTES
            _send(line, msgspec.structs.replace(answer, is_last=grown), *parts)
            if grown:
                return


def lower_priority(niceness: int) -> None:
    """Let this process give way to others, also where Linux shares time among sessions first."""
    os.nice(niceness)
    if niceness:
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much memory beyond what it has, where the system can say so."""
    size = _memory_pages(0) * resource.getpagesize()
    if size:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, hard))


def _answer(
    preparer: RequestPreparer, request: PrepareRequest, body: bytes
) -> tuple[PreparedHead | PreparationFailed, list[bytes]]:
    try:
        prepared, parts = protocol.split(preparer.prepare(request.kind, body, request.limits))
        return PreparedHead(prepared, len(parts)), parts
    except ApiError as error:
        return (
            PreparationFailed(
                error.status, error.message, error.param, error.code, error.retry_after_s
            ),
            [],
        )
    except MemoryError:
        what = "The request takes more memory to read than the server grants"
        return PreparationFailed(400, what, code="request_too_large"), []
    except RecursionError:
        what = "The body is nested too deeply"
        return PreparationFailed(400, what, code="invalid_json"), []
    except Exception:
        LOG.exception("a request could not be prepared")
        return PreparationFailed(500, "The server failed; its log says why"), []


def _send(
    line: socket.socket, message: PreparerReady | PreparedHead | PreparationFailed, *parts: bytes
) -> None:
    line.sendall(encode_frame(protocol.encode(message)))
    for part in parts:
        line.sendall(len(part).to_bytes(_LENGTH_BYTES, "little"))
        line.sendall(part)


def _read_frame(line: socket.socket) -> bytes:
    """Return the next frame; empty where the socket is closed."""
    head = _read_exactly(line, _LENGTH_BYTES)
    return bytes(_read_exactly(line, int.from_bytes(head, "little"))) if head else b""


def _read_exactly(line: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        got = line.recv_into(view[have:])
        if not got:
            return bytearray()
        have += got
    return data


def _end_with(line: socket.socket) -> None:
    """End this process when the other side is gone, whatever is under way."""
    hung_up = select.poll()
    hung_up.register(line, 0)  # nothing but the end, which is always told
    hung_up.poll()
    os._exit(0)


def _resident_bytes() -> int:
    return _memory_pages(1) * resource.getpagesize()


def _memory_pages(field: int) -> int:
    """Return a field of Linux's `statm`: 0 is the size of memory, 1 what is resident; else 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[field])
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
