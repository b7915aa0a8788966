"""Who starts an engine waits until a deadline, and leaves no process behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="starts the process of an engine")

from meshwright.run.serve.client.engine_process import EngineProcess, EngineStartTimeoutError
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.worker.protocol import StartEngine, encode_message

STUCK, MORTAL = "tests.run.serve.worker.stuck", "tests.run.serve.worker.mortal"
START = StartEngine("nowhere", EngineConfig(device="cpu"))


@pytest.mark.parametrize("does", ["nothing", "connects"])
def test_an_engine_that_never_gets_ready_is_ended_at_its_deadline(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK", does)
    with pytest.raises(
        EngineStartTimeoutError, match=r"not ready within 2 s.*raise --startup-timeout"
    ) as found:
        EngineProcess(START, STUCK, start_s=2)
    number = re.search(r"process (\d+)", str(found.value))
    assert number is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(number[1]), 0)


@pytest.mark.parametrize(
    "when", ["at once", "with its start unread", "some time after it was heard last"]
)
def test_an_engine_that_dies_while_it_starts_is_told_by_how_it_died(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIES", when)
    with pytest.raises(EngineDeadError, match="was ended by SIGKILL"):
        EngineProcess(START, "tests.run.serve.worker.short_lived", start_s=60)


@pytest.mark.parametrize("does", ["nothing", "connects"])
def test_an_engine_that_is_given_up_before_it_is_ready_is_ended(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK", does)
    given_up = threading.Event()
    threading.Timer(1, given_up.set).start()
    began_s = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"process \d+ was given up") as found:
        EngineProcess(START, STUCK, start_s=60, given_up=given_up)
    assert time.monotonic() - began_s < 20
    number = re.search(r"process (\d+)", str(found.value))
    assert number is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(number[1]), 0)


@pytest.mark.parametrize("said", [b"", b"\x01\0\0\0\xc1"])
def test_a_process_that_nobody_can_ask_ends_whatever_goes_wrong_with_it(said: bytes) -> None:
    process = EngineProcess(START, "tests.run.serve.worker.careless", start_s=120)
    if said:
        process.socket.sendall(said)  # a frame that is no message
    else:
        process.socket.shutdown(socket.SHUT_RDWR)
    assert process.exit_reason() == "the engine's process ended with code 0"
    process.stop()


@pytest.mark.parametrize("how", ["is killed", "is ended"])
def test_parcels_go_with_the_process_that_sent_them(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "born"))
    process = EngineProcess(START, MORTAL, start_s=60)
    place = Path((tmp_path / "born").read_text())
    assert place.read_bytes() == b"keys"
    if how == "is killed":
        os.kill(process.pid, signal.SIGKILL)
        assert "SIGKILL" in process.exit_reason()
    else:
        process.stop()
    assert not place.parent.exists()
    process.stop()


def test_an_engine_that_nobody_waits_for_any_more_does_not_go_on_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK", "begins")
    path = str(tmp_path / "engine")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen(1)
        listening.settimeout(60)
        with subprocess.Popen([sys.executable, "-m", STUCK, path]) as process:
            try:
                connection, _ = listening.accept()
                connection.sendall(encode_message(START))
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(1)
                connection.close()
                assert process.wait(60) == 0
            finally:
                process.kill()
