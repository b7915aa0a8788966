"""Nothing of a request stays behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("more", [100, pytest.param(1250, marks=pytest.mark.slow)])
def test_requests_leave_nothing_behind(more: int) -> None:
    command = [sys.executable, "-m", "tests.run.serve.server.leaking", "50", str(more)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert json.loads(said) == {"grown": {}, "held": [0, 0, 0], "aborted": 50 + more}
