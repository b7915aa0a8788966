"""The example of the guide runs, and says what the guide says it does."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "guide" / "posttrain-objectives.md"


def test_the_guide_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(GUIDE), "exec"), names)
    assert names["step"].tokens == 9
    assert names["figures"]["logprob_gap_max"] == pytest.approx(0.01, abs=1e-6)
    assert f'# "{names["words"]}"' in block
    assert names["table"].grad is not None
