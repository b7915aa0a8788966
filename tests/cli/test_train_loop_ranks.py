"""`mw train --recipe grpo` by several processes: started alike, refused early, told once."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="ranks load torch")

from meshwright.cli import main
from meshwright.run.parallel.launch import local

Captured = pytest.CaptureFixture[str]
FILE = """
steps = 2
prompts_per_step = 4
group_size = 4
threads = 1
checkpoint_every_steps = 1

[recipe]
kind = "grpo"

[task]
digits = 3
reward = "share"

[network]
layers = 2
hidden = 16
heads = 2
ffn = 32

[layout]
dp = 2
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "loop.toml").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "loop.toml"


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the start of a rank fail a test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(local, "_started", start)


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--nproc-per-node", "3"],
            "--nproc-per-node: 3 is not the number of ranks of the layout, which is 2",
        ),
        (["layout.dp=4", "--nproc-per-node", "2"], "the layout, which is 4"),
        (
            ["placement=colocated", "--nproc-per-node", "2"],
            "placement: an engine shares its memory",
        ),
        (
            ["layout.microbatch=2", "--nproc-per-node", "2"],
            "layout.microbatch: answers of unlike length",
        ),
        (
            ["--stop-at-step", "1", "--nproc-per-node", "2"],
            "--stop-at-step: is nothing that reinforcement learning",
        ),
    ],
)
def test_what_no_rank_could_run_starts_none(
    words: list[str], said: str, file: str, capsys: Captured
) -> None:
    assert main(["train", file, *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_layout_of_several_ranks_needs_as_many_processes(file: str, capsys: Captured) -> None:
    assert main(["train", file]) == 2
    said = capsys.readouterr().err
    assert "layout: has 2 ranks, and 1 process was started" in said
    assert "--nproc-per-node 2" in said
    assert not Path("runs").exists()


@pytest.mark.slow
def test_ranks_of_this_machine_train_and_a_run_goes_on_by_its_folder(
    file: str, capfd: Captured
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", file, "--nproc-per-node", "2", "--output-dir", "run", "--json"])
    assert ended.value.code == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["schema"], answer["steps"]) == ("meshwright.train.loop/2", 2)
    words = ["steps=3", "layout.dp=1", "layout.tp=2"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "run", *words, "--nproc-per-node", "2", "--json"])
    assert ended.value.code == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 3
    assert main(["train", "run", "steps=4", "layout.tp=1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 4
    rows = [json.loads(row)["step"] for row in Path("run/metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4]


def test_launchers_start_as_many_ranks_as_the_layout_has(file: str, capsys: Captured) -> None:
    assert main(["launch", "slurm", file, "--gpus-per-node", "2", "--quiet"]) == 0
    assert "1 node with 2 GPUs" in capsys.readouterr().out
    assert main(["launch", "slurm", file, "placement=colocated"]) == 2
    assert "placement: an engine shares its memory" in capsys.readouterr().err
