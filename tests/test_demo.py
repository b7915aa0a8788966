"""`make demo` goes around the loop and leaves one report."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo runs what it predicts")

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_ends_with_a_report_of_every_chapter(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, DEMO],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "was predicted and one of" in ended.stdout
    page = (tmp_path / "demo-out" / "report.html").read_text(encoding="utf-8")
    assert page.count('class="chapter"') == 4
    assert page.count("rank 3, stage 1") == 1  # four ranks were measured, two stand for all
    assert "<h2>findings</h2>" in page
