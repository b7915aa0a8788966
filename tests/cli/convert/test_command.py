"""`mw convert`: what a run has learnt, for everything that reads Hugging Face folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.cli import main
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.train.data.tokenization.bpe_trainer import save_tokenizer, train_bpe
from meshwright.run.train.data.tokenization.corpus_tokenization import tokenize_files
from meshwright.run.train.data.tokenization.tokenizer import open_tokenizer
from meshwright.run.train.loop import train
from tests.run.train.tiny import saved_tensors, tiny_job, write_corpus

Captured = pytest.CaptureFixture[str]


EXPERTS = {
    "name": "moe",
    "mixer": {"kind": "attention", "heads": 2, "kv_heads": 2, "head_dim": 8, "rotary": {}},
    "mlp": {"kind": "experts", "count": 4, "top_k": 2, "width": 16},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bf16 with fp32 masters and an average, after three steps."""
    folder = tmp_path_factory.mktemp("export")
    changes = {"layout": {"precision": "bf16"}, "optimizer": {"ema_decay": 0.5}}
    train(tiny_job(write_corpus(folder), changes), folder / "run", stop_at_step=3)
    return folder / "run"


def test_the_weights_come_back_as_they_were(run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["convert", str(run), str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.convert/1"
    assert (answer["step"], answer["dtype"]) == (3, "bfloat16")
    assert answer["files"] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    decoder, saved = load_hf_checkpoint(None, tmp_path), saved_tensors(run)
    for name, value in decoder.named_parameters():
        assert torch.equal(value, saved[f"model.{name}"])


@pytest.mark.parametrize(("flag", "kind"), [((), "master"), (("--ema",), "average")])
def test_fp32_has_every_digit_there_is(
    run: Path, tmp_path: Path, flag: tuple[str, ...], kind: str
) -> None:
    assert main(["convert", str(run), str(tmp_path), "--dtype", "fp32", *flag]) == 0
    found = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(found, saved_tensors(run)[f"optimizer.{kind}.embedding.weight"])


def test_transformers_reads_it(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(["convert", str(run), str(tmp_path), "--dtype", "fp32"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = load_hf_checkpoint(None, tmp_path, dtype=torch.float32)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-4)
    assert theirs.generation_config.eos_token_id == 257
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 257


def test_a_model_that_its_family_cannot_say_can_be_given_another(
    tmp_path: Path, capsys: Captured
) -> None:
    changes = {"model": {"tied": False, "blocks": [EXPERTS], "pattern": "2*moe"}}
    train(tiny_job(write_corpus(tmp_path), changes), tmp_path / "run", stop_at_step=1)
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(words) == 2
    assert "name a family that has it" in capsys.readouterr().err
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("[model]", '[model]\nfamily = "mixtral"', 1))
    assert main(words) == 0


def test_the_token_that_ended_documents_ends_generation(tmp_path: Path) -> None:
    made = tmp_path / "mine.json"
    save_tokenizer(train_bpe(["some text"], 260, special=["<stop>"]), made)
    (tmp_path / "text.txt").write_text("some text " * 200)
    tokenizer = open_tokenizer(str(made), end="<stop>")
    tokenize_files([str(tmp_path / "text.txt")], tmp_path / "tokens", tokenizer, workers=1)
    changes = {"model": {"vocab": 264}, "data": {"validation_fraction": 0.0}}
    train(tiny_job(tmp_path / "tokens", changes), tmp_path / "run", stop_at_step=1)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    stops = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert stops["eos_token_id"] == tokenizer.vocabulary.eos
    about = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert about["eos_token"] == "<stop>"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere", "out"], "no run of mw train"),
        (["RUN", "out", "--step", "2"], "no checkpoint of step 2"),
        (["RUN", "out", "--dtype", "int3"], "'int3' is not a choice"),
    ],
)
def test_mistakes_are_named(words: list[str], text: str, run: Path, capsys: Captured) -> None:
    assert main(["convert", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert text in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_run_without_an_average_says_so(tmp_path: Path, capsys: Captured) -> None:
    train(tiny_job(write_corpus(tmp_path)), tmp_path / "run", stop_at_step=1)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--ema"]) == 2
    assert "keeps no average" in capsys.readouterr().err
