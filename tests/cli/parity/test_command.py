"""`mw parity` says what was shrunk, how far layouts are off, and where they begin to disagree."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

from meshwright.cli import main
from meshwright.run.parallel.verify import layout_verification
from meshwright.run.parallel.verify.deviation import Deviation, FirstDivergence
from meshwright.run.parallel.verify.layout_verification import LayoutCheck
from meshwright.spec.layout import Layout

Out = pytest.CaptureFixture[str]
SMALL = ("--sequence-length", "16", "--global-batch", "4")


def test_a_sound_layout_agrees(capsys: Out, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[layout]\ntp = 2\nsequence_parallel = true\n")
    assert main(["parity", "gpt2", "--layout", str(file), *SMALL, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.parity/1"
    assert answer["agree"] is True
    (layout,) = answer["layouts"]
    assert layout["layout"]["tp"] == 2
    assert {one["kind"] for one in layout["worst"]} == {"activation", "gradient", "update"}
    assert {"field": "hidden", "original": 768, "reduced": 64} in answer["shrunk"]


def test_a_job_file_has_a_model_and_a_layout(capsys: Out, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('model = "gpt2"\n[layout]\ndp = 4\n[data]\nsources = ["builtin"]\n')
    words = ["parity", str(job), "--dry-run", "--sequence-length", "32", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["ranks"] == 4
    assert main([*words, "--layout", "tp=2"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["ranks"] == 2


def test_a_disagreement_is_told_and_ends_with_one(
    capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = Deviation("gradient", "layers.0.mlp.down.weight", 1, 2e-2, 0.0, 1e-5)
    first = FirstDivergence("gradient", off.name, (1, 3), off)
    said = LayoutCheck(Layout(tp=2, dp=2), False, (off,), first, (off,), "", 0.1)
    failed = LayoutCheck(Layout(dp=2), False, (), None, (), "rank 1: no memory left", 0.1)
    monkeypatch.setattr(layout_verification, "verify_layouts", lambda *_: [said, failed])
    layouts = ["--layout", "tp=2,dp=2", "--layout", "dp=2"]
    assert main(["parity", "gpt2", *layouts]) == 1
    shown = capsys.readouterr().out
    assert "gradient layers.0.mlp.down.weight" in shown
    assert "1, 3" in shown
    assert "rank 1: no memory left" in shown
    assert main(["parity", "gpt2", *layouts, "-q"]) == 1
    assert capsys.readouterr().out.split() == ["disagrees", "disagrees"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], '--layout "tp=2,sequence_parallel=true"'),
        (["--layout", "tp"], "'tp' is no KEY=VALUE"),
        (["--layout", "tp=2,tq=3"], "tq"),
        (["--layout", "tp=two"], "tp"),
        (["--layout", "dp=16"], "--dry-run"),
        (["--layout", "tp=5"], "does not divide"),
        (["--layout", "dp=3"], "multiple of dp"),
        (["--layout", "dp=2", "--layout", "ep=2"], "--layout 2"),
        (["--layout", "dp=2", "--precision", "mxfp8"], "bf16"),
        (["--layout", "dp=2", "--precision", "fp31"], "fp32"),
        (["--layout", "dp=2", "--all-ranks"], "--dry-run"),
        (["--layout", "dp=2", "--global-batch", "0"], "--global-batch"),
    ],
)
def test_what_cannot_be_verified_is_refused_with_a_fix(
    words: list[str], said: str, capsys: Out
) -> None:
    assert main(["parity", "gpt2", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown


def test_lists_are_written_with_commas(capsys: Out) -> None:
    layout = "pp=2,stage_layers=5,7,dp=16"
    words = ["parity", "gpt2", "--layout", layout, "--dry-run", "--sequence-length", "64", "--json"]
    assert main(words) == 0
    (found,) = json.loads(capsys.readouterr().out)["layouts"]
    assert found["ranks"] == 32
    assert found["problems"] == []
    assert found["schedule"].endswith("sound")
    assert {one["group"] for one in found["traffic"]} >= {"dp-cp", "pp", "embedding"}


def test_a_dry_run_can_play_every_rank(capsys: Out) -> None:
    words = [
        "parity",
        "gpt2",
        "--layout",
        "tp=2,dp=2",
        "--dry-run",
        "--all-ranks",
        "--sequence-length",
        "32",
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "4 ranks in" in shown
    assert "every group does the same in the same order" in shown
