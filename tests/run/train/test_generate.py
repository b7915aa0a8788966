"""The example that lets a trained model write runs on a folder that we saved."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the example opens a tokenizer.json")

from meshwright.run.nn import huggingface, materialize
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.train.data import open_tokenizer
from tests.run.train.tiny import tiny_job

SCRIPT = Path(__file__).parents[3] / "examples" / "generate.py"


def test_it_prints_each_prompt_and_what_the_model_adds(
    tokens: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    decoder = build_decoder(tiny_job(tokens).model)
    materialize(decoder, "cpu")
    huggingface.save_hf_checkpoint(decoder, tmp_path)
    (tmp_path / "tokenizer.json").write_text(open_tokenizer("bytes").json, encoding="utf-8")
    words = [str(SCRIPT), str(tmp_path), "2 times", "6", "--tokens", "3", "--line"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.split("\n")
    assert [line.partition("▸")[0] for line in lines[:2]] == ["2 times", "6"]
