"""The tokenizer and the loader are measured as training uses them."""

import time
from pathlib import Path

import pytest

from meshwright.observe.bench import timing
from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.io import data_loader

torch = pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("tokenizers", reason="text is cut by it")


def test_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_loader, "TEXT_BYTES", {"quick": 30_000})
    monkeypatch.setattr(timing, "BUDGET_S", 0.01)
    monkeypatch.setattr(data_loader, "VOCAB_SIZE", 400)
    monkeypatch.setattr(data_loader, "CORPUS_TOKENS", {"quick": 1 << 16})
    monkeypatch.setattr(data_loader, "SEQ_LEN", 64)
    place = BenchTarget(torch.device("cpu"), str(tmp_path))
    rows = dict[str, BenchRow]()
    for row in data_loader.run_data_loader_cases(
        data_loader.list_data_loader_cases("quick", False), place, time.monotonic() + 60
    ):
        assert isinstance(row, BenchRow), row
        rows[row.case.name] = row
    assert set(rows) == {"load", "tokenize", "train_tokenizer"}
    assert rows["load"].items == data_loader.STEPS * data_loader.BATCH * 64
    # A token of a small vocabulary has one byte or a few.
    text = rows["tokenize"]
    assert text.bytes is not None
    assert text.items is not None
    assert 1.0 < text.bytes / text.items < 6.0
    assert list(tmp_path.iterdir()) == []
