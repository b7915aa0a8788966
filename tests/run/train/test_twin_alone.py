"""Steps of one device are timed, and some are recorded."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="steps run on torch")

from meshwright.run.train.profiling.single_device_steps import TimingBudget, time_single_device
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model

TINY = build_decoder_model("tiny", layers=1, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=64)


def test_steps_are_timed_and_some_are_recorded(tmp_path: Path) -> None:
    times = TimingBudget(warmup_s=0.0, min_s=0.0, min_steps=3, profiled_steps=2)
    found = time_single_device(
        TINY, Layout(precision="fp32"), length=16, sequences=2, folder=tmp_path / "t", times=times
    )
    assert len(found.step_times_s) == 3
    assert all(seconds > 0 for seconds in found.step_times_s)
    assert found.profiled_steps == 2
    names = set(found.timeline.string_column("name").values)
    assert {"step 1", "step 2"} <= names
    first, last = found.first_and_last_loss
    assert first == pytest.approx(4.16, abs=0.3)  # ln 64: nothing is known yet
    assert last == pytest.approx(first, abs=0.5)
