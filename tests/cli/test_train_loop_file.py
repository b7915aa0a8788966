"""`mw train` of a loop's file: what it begins with and asks is found, or told by name."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

from meshwright.cli import main
from tests.run.posttrain.prompt_task.small import prompts_in, reward_folder
from tests.run.posttrain.supervised.tiny import model_folder, pairs, write

Captured = pytest.CaptureFixture[str]
FILE = """
model = "base"
steps = 1
prompts_per_step = 2
group_size = 2
max_tokens = 4
threads = 1
evaluate.num_prompts = 0

[task]
name = "questions"
train = "train.jsonl"

[[task.rewards]]
kind = "model"
model = "liked"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work beside a folder with a file, and all that it names."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    shutil.copytree(model_folder(), folder / "base")
    shutil.copytree(reward_folder(), folder / "liked")
    prompts_in(folder)
    (folder / "loop.toml").write_text(FILE)
    return folder


def refused(words: list[str], capsys: Captured) -> str:
    assert main(["train", *words]) == 2
    return capsys.readouterr().err


def test_paths_count_from_the_files_folder_and_a_task_says_what_recipe_it_is(
    here: Path, capsys: Captured
) -> None:
    assert main(["train", "mine/loop.toml", "--output-dir", "run"]) == 0
    told = capsys.readouterr()
    assert "truncated_fraction" in told.out
    assert main(["simulate", "rl", "mine/loop.toml", "--cluster", "cpu-host"]) == 0


def test_a_model_that_is_not_there_is_named(here: Path, capsys: Captured) -> None:
    told = refused(["mine/loop.toml", "model=nowhere"], capsys)
    assert "model: there is no nowhere\n  hint: give a Hugging Face folder" in told


@pytest.mark.parametrize("job", ["mine/loop.toml model=m.gguf", "--recipe grpo m.gguf"])
def test_a_gguf_file_is_refused_with_what_makes_a_folder_of_it(
    job: str, here: Path, capsys: Captured
) -> None:
    Path("m.gguf").write_bytes(b"GGUF")
    assert "hint: make one of it: mw convert m.gguf m --dtype fp32" in refused(job.split(), capsys)


def test_a_misspelt_target_beside_a_right_one_is_refused(here: Path, capsys: Captured) -> None:
    told = refused(["mine/loop.toml", "adapter.target_modules=q_proj,v_prj"], capsys)
    assert "adapter.target_modules: 'v_prj' names no linear layer" in told


def test_who_wants_to_begin_anew_is_told_how(here: Path, capsys: Captured) -> None:
    assert "hint: start in another folder" in refused(["mine/loop.toml", "--no-resume"], capsys)


def test_a_reward_model_is_not_offered_to_be_served(here: Path, capsys: Captured) -> None:
    write(Path("pairs.jsonl"), pairs(4))
    words = ["--recipe", "reward", "mine/base", "data.sources=pairs.jsonl", "adapter.rank=2",
             "workload.global_batch=4", "device.threads=1", "device.type=cpu",
             "logging.progress=none", "--output-dir", "rm"]  # fmt: skip
    assert main(["train", *words]) == 0
    told = capsys.readouterr().err
    assert "mw convert rm FOLDER --merge-adapter writes the reward model" in told
    assert "mw serve" not in told
