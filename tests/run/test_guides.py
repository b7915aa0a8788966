"""The examples of the guides to kernels and data run."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="kernels and batches are torch's tensors")

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guide"


def run_blocks(page: str) -> dict[str, Any]:
    """Run the Python of a page from top to bottom, and return its names."""
    guide = GUIDES / page
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(guide), "exec"), names)
    return names


def test_the_guide_to_kernels_runs() -> None:
    names = run_blocks("kernels.md")
    assert names["normed"].shape == names["total"].shape == names["x"].shape


def test_the_guide_to_data_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_blocks("data.md")
    assert names["batch"].step == 1000
    assert names["batch"].tokens_BT.shape == (32, 512)
    assert names["tokens"][names["starts"][1] - 1] == 257  # a document's end
