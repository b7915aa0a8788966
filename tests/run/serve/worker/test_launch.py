"""Who starts an engine waits until a deadline, and leaves no process behind."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="starts the process of an engine")

from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.worker.frames import Start, framed
from meshwright.run.serve.worker.launch import EngineProcess, NotStarted

STUCK = "tests.run.serve.worker.stuck"
START = Start("nowhere", EngineSettings(device="cpu"))


@pytest.mark.parametrize("does", ["nothing", "connects"])
def test_an_engine_that_never_gets_ready_is_ended_at_its_deadline(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK", does)
    with pytest.raises(NotStarted, match=r"not ready within 2 s.*raise start_s") as found:
        EngineProcess(START, STUCK, start_s=2)
    number = re.search(r"process (\d+)", str(found.value))
    assert number is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(number[1]), 0)


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
                connection.sendall(framed(START))
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(1)
                connection.close()
                assert process.wait(60) == 0
            finally:
                process.kill()
