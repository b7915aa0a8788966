"""The benchmark of drift judges recorded runs: what is clean, what is added, what was planted."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import drift


def write_series(folder: Path) -> Path:
    """Write a run of 900 clean steps, then 100 whose update takes 60 ms longer."""
    random = np.random.default_rng(0)
    gradients = (240_000 * random.lognormal(0.0, 0.01, 1000)).astype(int)
    update = np.where(np.arange(1000) < 900, 60_000, 120_000)
    stretches = [{"fault": "", "share": 0.0, "first": 1, "last": 900},
                 {"fault": "update", "share": 0.2, "first": 901, "last": 1000}]  # fmt: skip
    data = {"model": "a model", "device": "a device", "first": 1, "stretches": stretches}
    nothing = [0] * 1000
    columns = {"step_us": (gradients + update).tolist(), "gradients_us": gradients.tolist(),
               "update_us": update.tolist(), "between_us": nothing,
               "data_wait_us": nothing}  # fmt: skip
    path = folder / "drift-test.json"
    path.write_text(json.dumps(data | columns))
    return path


def test_recorded_runs_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "NOISE", {})
    monkeypatch.setattr(drift, "OTHER", {})
    monkeypatch.setattr(drift, "SERIES", write_series(tmp_path).parent)
    found = drift.measure(True)["figures"]
    assert isinstance(found, list)
    values = {one["name"]: one["value"] for one in found}
    assert values["test, clean: false alarms"] == 0
    assert values["test, 5 % added: told"] == 100
    assert values["test, 20 % added: the right term named"] == 100
    assert values["test, planted, update, 20 %: delay"] <= 8
    assert values["test, planted, update, 20 %: the right term named"] == 1
