"""`mw plan serve`: the cheapest fleet, why, what binds it, and its command lines."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.spec import catalog
from meshwright.spec.model.huggingface import write_config

Captured = pytest.CaptureFixture[str]
WORDS = [
    "llama3.1-8b", "--cluster", "h200-superpod", "--rate", "60", "--prompt", "200-2000",
    "--output", "10-200", "--requests", "400", "--slo", "ttft=500ms,itl=50ms", "--gpus", "8",
    "--tp", "1,2", "--pp", "1",
]  # fmt: skip


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["plan", "serve", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_answer_has_plans_and_their_command_lines(capsys: Captured) -> None:
    found = answer(WORDS, capsys)
    gpus = [plan["fleet"]["gpus"] for plan in found["plans"]]
    assert gpus == sorted(gpus)
    assert found["plans"][0]["outcome"]["good_share"] >= 0.99
    assert found["commands"]["target"] == "vllm"
    assert found["commands"]["lines"][0].startswith("vllm serve MODEL_DIR ")


def test_command_lines_name_a_folder_and_no_catalog_name(tmp_path: Path, capsys: Captured) -> None:
    few = [*WORDS[1:], "--requests", "50", "--for", "meshwright"]
    known = answer([WORDS[0], *few], capsys)["commands"]
    assert known["lines"][0].startswith("mw serve MODEL_DIR ")
    assert "MODEL_DIR stands for the folder with the weights of llama3.1-8b" in known["notes"]
    (tmp_path / "config.json").write_text(json.dumps(write_config(catalog.model(WORDS[0]))))
    own = answer([str(tmp_path), *few], capsys)["commands"]
    assert own["lines"][0].startswith(f"mw serve {tmp_path} ")
    assert own["notes"] == []


def test_the_screen_fits_eighty_columns(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["plan", "serve", *WORDS]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any("what binds" in line for line in lines)


def test_nothing_that_does_is_the_answer_no(capsys: Captured) -> None:
    words = [*WORDS[:-6], "--gpus", "1", "--slo", "ttft=5ms"]
    found = answer(words, capsys, code=1)
    assert found["plans"] == []
    assert "alone" in found["refused"]["1 GPU"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3.1-8b", "--cluster", "h200-superpod", "--rate", "1"], "--slo"),
        ([*WORDS[:3], "--concurrency", "4", "--slo", "ttft=1s"], "one rate"),
        ([*WORDS, "--for", "vlm"], "vllm"),
    ],
)
def test_faults_are_named(words: list[str], said: str, capsys: Captured) -> None:
    assert main(["plan", "serve", *words]) == 2
    assert said in capsys.readouterr().err
