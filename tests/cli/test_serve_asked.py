"""What cannot be asked of a served model is refused, or left out and counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]
WORDS = ["llama3.1-8b", "--cluster", "h200-superpod", "--rate", "5", "--requests", "50"]
TIMELY = ["--slo", "ttft=1s"]


def data(words: list[str], capsys: Captured) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "asked.csv"
    rows = ["0,100,10", "1,50000,10", "2,40950,11", "3,40950,10", "4,200,20"]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    return str(path)


def test_requests_beyond_the_context_are_left_out_and_counted(trace: str, capsys: Captured) -> None:
    # Two of them are longer than the 40,960 tokens, one is just as long.
    words = ["qwen3-8b", "--cluster", "h200-superpod", "--trace", trace]
    (run,) = data(["simulate", "serve", *words], capsys)["runs"]
    assert (run["requests"], run["beyond_context"]) == (3, 2)
    assert main(["simulate", "serve", *words]) == 0
    note = "2 requests are longer than the context of qwen3-8b, 40,960 tokens"
    assert note in capsys.readouterr().err
    plan = ["plan", "serve", *words, "--slo", "ttft=20s", "--gpus", "2"]
    assert data(plan, capsys)["beyond_context"] == 2
    assert main(plan) == 0
    assert note in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_requests_that_are_all_beyond_it_are_a_fault(command: str, capsys: Captured) -> None:
    assert main([command, "serve", *WORDS, "--prompt", "200000", *TIMELY]) == 2
    told = capsys.readouterr().err
    assert "--prompt" in told
    assert "131,072 tokens: the shortest has 200,128" in told


def test_what_fits_is_not_spoken_of(capsys: Captured) -> None:
    assert data(["simulate", "serve", *WORDS], capsys)["runs"][0]["beyond_context"] == 0
    assert main(["simulate", "serve", *WORDS]) == 0
    assert "context" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slo-attainment", "0.5"], "--slo"),
        (["--slo", "ttft=500"], "ttft=500ms or ttft=500s"),
        (["--replicas", "0"], "--replicas: 0 "),
        (["--max-num-batched-tokens", "512"], "use 1024 or more, or --max-num-seqs 512"),
        (["--prefix", "8:1024", "--prompt", "512"], "use --prompt 1536"),
    ],
)
def test_faults_name_the_flag_and_what_would_do(
    words: list[str], said: str, capsys: Captured
) -> None:
    assert main(["simulate", "serve", *WORDS, *words]) == 2
    assert said in capsys.readouterr().err
