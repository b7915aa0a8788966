"""A server holds nothing of the requests it has answered, seen from outside of its processes."""

import os
import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")
pytest.importorskip("llguidance", reason="binds answers")

from benchmarks.serve_soak import SETUPS, open_files, soak, tiny_model


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_a_connection_counts_as_open_only_where_it_stays_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
        with accepted:
            held = open_files([os.getpid()], wait_s=0.0)
            # The server notices some time after its client has gone.
            later = threading.Timer(0.3, accepted.close)
            later.start()
            assert open_files([os.getpid()]) == held - 1
            later.join()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
@pytest.mark.parametrize("name", SETUPS)
def test_nothing_is_held_while_nobody_asks(name: str) -> None:
    seen = soak(tiny_model(), SETUPS[name][0], 2040, 12)
    assert not seen.wrong
    assert {held.open for held in seen.samples} == {(0.0, 0.0, 0.0, 0.0)}
    assert seen.more("files") <= 0
    assert seen.more("threads") <= 2  # a pool's come and go
