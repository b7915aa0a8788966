"""Steps of one device are timed, and some are recorded."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="steps run on torch")

from meshwright.run.train.twin.alone import Times, run_alone
from meshwright.spec.layout import Layout
from meshwright.spec.model import decoder

TINY = decoder("tiny", layers=1, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=64)


def test_steps_are_timed_and_some_are_recorded(tmp_path: Path) -> None:
    times = Times(heat_s=0.0, least_s=0.0, least_steps=3, recorded=2)
    found = run_alone(
        TINY, Layout(precision="fp32"), length=16, sequences=2, folder=tmp_path / "t", times=times
    )
    assert len(found.steps_s) == 3
    assert all(seconds > 0 for seconds in found.steps_s)
    assert found.recorded == 2
    names = set(found.timeline.strings("name").values)
    assert {"step 1", "step 2"} <= names
    first, last = found.losses
    assert first == pytest.approx(4.16, abs=0.3)  # ln 64: nothing is known yet
    assert last == pytest.approx(first, abs=0.5)
