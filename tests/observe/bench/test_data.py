"""The tokenizer and the loader are measured as training uses them."""

import time
from pathlib import Path

import pytest

from meshwright.observe.bench import data as home
from meshwright.observe.bench import passes
from meshwright.observe.bench.case import Row
from meshwright.observe.bench.family import Place

torch = pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("tokenizers", reason="text is cut by it")


def test_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "TEXT_BYTES", {"quick": 30_000})
    monkeypatch.setattr(passes, "BUDGET_S", 0.01)
    monkeypatch.setattr(home, "VOCABULARY", 400)
    monkeypatch.setattr(home, "CORPUS_TOKENS", {"quick": 1 << 16})
    monkeypatch.setattr(home, "LENGTH", 64)
    place = Place(torch.device("cpu"), str(tmp_path))
    rows = dict[str, Row]()
    for row in home.sweep(home.cases("quick", False), place, time.monotonic() + 60):
        assert isinstance(row, Row), row
        rows[row.case.name] = row
    assert set(rows) == {"load", "tokenize", "train_tokenizer"}
    assert rows["load"].items == home.STEPS * home.BATCH * 64
    # A token of a small vocabulary has one byte or a few.
    text = rows["tokenize"]
    assert text.bytes is not None
    assert text.items is not None
    assert 1.0 < text.bytes / text.items < 6.0
    assert list(tmp_path.iterdir()) == []
