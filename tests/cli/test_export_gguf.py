"""`mw convert FILE.gguf`: the same model as a Hugging Face folder, for what begins with folders."""

import json
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.cli import main
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from tests.run.nn.huggingface.reference import opened
from tests.run.posttrain.data.small_words import CHATML
from tests.run.posttrain.supervised.tiny import model_folder
from tests.run.serve.model.gguf_made import write_gguf

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with weights and words."""
    described = json.loads((model_folder() / "tokenizer.json").read_text())
    described["gguf"] = {"model": "gpt2", "pre": "gpt-2", "bos": 1, "eos": 2, "add_bos": False,
                         "template": CHATML}  # fmt: skip
    write_gguf(tmp_path / "m.gguf", opened(model_folder()), tokenizer=json.dumps(described))
    return tmp_path / "m.gguf"


def test_a_gguf_file_becomes_a_folder_with_its_weights_and_words(
    file: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["convert", str(file), str(tmp_path / "out"), "--dtype", "fp32", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"] is None
    before = load_served_model(file, dtype=torch.float32).state_dict()
    after = load_served_model(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    text = "bo likes pears"
    found, wanted = (load_tokenizer(path).backend_tokenizer for path in (tmp_path / "out", file))
    assert found.encode(text).ids == wanted.encode(text).ids


@pytest.mark.parametrize("flag", [["--merge-adapter"], ["--ema"], ["--step", "2"]])
def test_what_runs_alone_have_is_refused(
    flag: list[str], file: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["convert", str(file), str(tmp_path / "out"), *flag]) == 2
    assert f"{flag[0]}: is of training runs" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: Captured) -> None:
    assert main(["convert", str(tmp_path / "no.gguf"), str(tmp_path / "out")]) == 2
    assert "no.gguf: there is no such file" in capsys.readouterr().err
