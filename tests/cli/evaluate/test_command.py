"""`mw evaluate`: questions to a model, or pairs to a reward model, and shares out."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

from meshwright.cli import main
from meshwright.run.posttrain.supervised import export_recipe
from tests.run.posttrain.supervised.tiny import (
    chats,
    model_folder,
    pairs,
    recipe_job,
    trained,
    write,
)

Captured = pytest.CaptureFixture[str]
ENGINE = ["--device", "cpu", "--dtype", "fp32", "--max-model-len", "64", "--max-tokens", "6"]


def shares(words: list[str], capsys: Captured) -> dict[str, float]:
    assert main(["evaluate", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.evaluate/2"
    return {one["name"]: one["share"] for one in answer["scores"]}


def test_what_a_model_learnt_shows_on_chats_held_out(tmp_path: Path, capsys: Captured) -> None:
    changes = {"epochs": 12.0, "workload": {"global_batch": 4}}
    trained(recipe_job("sft", tmp_path, changes, records=chats(60)), tmp_path / "run")
    export_recipe(tmp_path / "run", tmp_path / "model")
    file = str(tmp_path / "records.jsonl")
    verdicts = tmp_path / "verdicts.jsonl"
    asked = [file, "--validation", "0.1", *ENGINE]
    capsys.readouterr()
    learnt = shares([str(tmp_path / "model"), *asked, "--out", str(verdicts)], capsys)
    assert learnt["exact"] > 0.5
    assert shares([str(model_folder()), *asked], capsys)["exact"] == 0.0
    rows = [json.loads(line) for line in verdicts.read_text().splitlines()]
    assert len(rows) == 6
    assert rows[0]["where"].endswith("records.jsonl:10")


def test_a_reward_model_judges_pairs(tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    changes = {"optimizer": {"lr": 0.003}, "epochs": 2.0, "adapter": {"rank": 4}}
    trained(recipe_job("reward", tmp_path, changes), run)
    file = str(write(tmp_path / "new.jsonl", pairs(60)[50:]))
    capsys.readouterr()
    words = [str(model_folder()), file, "--lora-modules", f"own={run}/adapter", "--device", "cpu"]
    assert shares(words, capsys) == {"pairs preferred": 1.0}
    write(tmp_path / "new.jsonl", chats(3))
    assert main(["evaluate", *words]) == 2
    assert "new.jsonl:1: holds chats, and a reward model judges pairs" in capsys.readouterr().err


def test_flags_that_cannot_be_are_refused(tmp_path: Path, capsys: Captured) -> None:
    file = str(write(tmp_path / "new.jsonl", chats(3)))
    for words, what in (
        (["--validation", "2"], "--validation: '2' is no share"),
        (["--pass-at", "0"], "--pass-at: '0' is no number of answers"),
        (["--lora-modules", "a=x", "--lora-modules", "b=y"], "--lora-modules: a, b are several"),
    ):
        assert main(["evaluate", str(model_folder()), file, *ENGINE, *words]) == 2
        assert what in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_named_by_its_line(tmp_path: Path, capsys: Captured) -> None:
    questions = [{"prompt": "hi", "answer": "a"}, {"prompt": "hi " * 200, "answer": "a"}]
    file = str(write(tmp_path / "new.jsonl", questions))
    assert main(["evaluate", str(model_folder()), file, *ENGINE]) == 2
    said = capsys.readouterr().err
    assert f"{file}:2: " in said
    assert "leave no room for an answer in 64" in said
    assert f"{file}:1" not in said
