"""The policy of a run leaves it as a folder that others read."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.cli import main
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.rl import RLResult, run_rl
from tests.run.posttrain.rl.small import settings
from tests.run.posttrain.supervised.tiny import model_folder

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RLResult]:
    """A run that began with a model, and how it ended."""
    folder = tmp_path_factory.mktemp("loop") / "run"
    return folder, run_rl(settings(folder=str(folder), steps=2, model=str(model_folder())))


def test_the_policy_is_read_as_it_was_left(
    trained: tuple[Path, RLResult], tmp_path: Path, capsys: Captured
) -> None:
    folder, outcome = trained
    assert main(["convert", str(folder), str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["dtype"]) == (2, "float32")
    assert {"tokenizer.json", "chat_template.jinja"} <= set(answer["files"])
    began, ended = (
        load_hf_checkpoint(None, each, dtype=torch.float32) for each in (model_folder(), tmp_path)
    )
    learnt = dict(outcome.decoder.named_parameters())
    assert all(torch.equal(one, learnt[name].cpu()) for name, one in ended.named_parameters())
    assert not torch.equal(began.head_weight, ended.head_weight), "it learnt something"


def test_transformers_reads_it(trained: tuple[Path, RLResult], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, outcome = trained
    assert main(["convert", str(folder), str(tmp_path), "-q"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor([[12, 3, 1, 10]])
    with torch.no_grad():
        ours = outcome.decoder.cpu()(tokens)
        torch.testing.assert_close(theirs(tokens).logits, ours, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_exported_says_why(
    trained: tuple[Path, RLResult], tmp_path: Path, capsys: Captured
) -> None:
    folder, _ = trained
    kept = {path.name: path.read_bytes() for path in model_folder().iterdir()}
    for words, said in (
        ([str(folder), str(model_folder())], "would be written over"),
        ([str(folder), str(folder)], "would be written over"),
        ([str(folder), "out", "--ema"], "keeps no average"),
        ([str(folder), "out", "--merge-adapter"], "has no adapter"),
        ([str(folder), "out", "--step", "7"], "no checkpoint of step 7"),
    ):
        assert main(["convert", *words]) == 2
        assert said in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model_folder().iterdir()} == kept
    run_rl(settings(steps=1, folder=str(tmp_path / "small")))
    assert main(["convert", str(tmp_path / "small"), str(tmp_path / "out")]) == 2
    assert "from random weights" in capsys.readouterr().err
