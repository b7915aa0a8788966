"""`mw twin` runs layouts, holds them against their prediction and says where they differ."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="steps run on torch")

from meshwright.cli import main
from meshwright.timeline import read_timeline

MODEL = """
name = "small"
hidden = 32
vocab = 61
pattern = "4*dense"
[[blocks]]
name = "dense"
mixer = { kind = "attention", heads = 4, kv_heads = 2, head_dim = 8 }
mlp = { kind = "mlp", width = 64 }
"""
SHORT = ("--seq-len", "16", "--num-sequences", "4", "--steps", "2")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "model.toml"
    file.write_text(MODEL)
    return str(file)


@pytest.mark.slow
def test_passes_of_two_ranks_run_in_the_order_that_was_predicted(
    model: str, tmp_path: Path, capsys: Captured
) -> None:
    layouts = ("--layout", "pp=2,schedule=zb-v,virtual_stages=2", "--layout", "tp=2")
    words = ["twin", model, *layouts, *SHORT, "--save", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.twin/2"
    for found in answer["layouts"]:
        assert found["order"] == "same", found["order_difference"]
        assert found["predicted"]["step_s"] > 0
        assert found["measured"]["step_s"] > 0
        assert 0 <= found["measured"]["bubble_share"] < 1
    names = {"forward", "backward-input", "backward-weight"}
    assert {each["name"] for each in answer["layouts"][0]["pass_durations"]} == names
    assert {each["name"] for each in answer["layouts"][1]["pass_durations"]} == {
        "forward",
        "backward",
    }
    for name in ("predicted", "measured"):
        assert read_timeline(tmp_path / "out" / "1" / name).num_spans
    assert (tmp_path / "out" / "1" / "calibration.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "ep=2,dp=2"], "leave ep and expert_tp out"),
        (["--layout", "dp=16", "--num-sequences", "16"], "more than the 8 that are run here"),
        (["--layout", "dp=3"], "dp"),
        (["--precision", "nvfp4"], "not for processors"),
        (["--steps", "0"], "--steps"),
        (["--layout", "tp"], "is no KEY=VALUE"),
        (["--save", "/dev/null/twin"], "name another folder"),
    ],
)
def test_what_cannot_be_run_is_refused_first(words: list[str], said: str, capsys: Captured) -> None:
    assert main(["twin", *words]) == 2
    assert said in capsys.readouterr().err
