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

SLOW = ["--slo", "ttft=1s,itl=40ms", "--tp", "8"]


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["plan", "serve", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_answer_has_plans_and_their_command_lines(capsys: Captured) -> None:
    found = answer(WORDS, capsys)
    gpus = [plan["fleet"]["gpus"] for plan in found["plans"]]
    assert gpus == sorted(gpus)
    assert found["plans"][0]["outcome"]["slo_attainment"] >= 0.99
    assert found["commands"]["target"] == "vllm"
    assert found["commands"]["lines"][0].startswith("vllm serve MODEL_DIR ")


def test_command_lines_name_a_folder_and_no_catalog_name(tmp_path: Path, capsys: Captured) -> None:
    few = [*WORDS[1:], "--requests", "50", "--for", "meshwright"]
    known = answer([WORDS[0], *few], capsys)["commands"]
    assert known["lines"][0].startswith("mw serve MODEL_DIR ")
    assert "MODEL_DIR stands for the folder with the weights of llama3.1-8b" in known["notes"]
    (tmp_path / "config.json").write_text(json.dumps(write_config(catalog.get_model(WORDS[0]))))
    own = answer([str(tmp_path), *few], capsys)["commands"]
    assert own["lines"][0].startswith(f"mw serve {tmp_path} ")
    assert own["notes"] == []


def test_a_plan_for_an_engine_is_made_of_its_own_times(capsys: Captured) -> None:
    slow = ["--rate", "5", "--slo", "ttft=2s", "--tp", "1", "--together"]
    few = [*WORDS, "--requests", "50", *slow]
    own = answer([*few, "--for", "sglang"], capsys)
    assert own["engine"] == own["plans"][0]["fleet"]["engine"] == "SGLang"
    named = answer([*few, "--engine", "sglang"], capsys)
    assert own["plans"] == named["plans"] != answer(few, capsys)["plans"]
    assert named["commands"]["target"] == "sglang"
    # `trtllm-serve` runs the newer of its two backends, and the other may be asked for.
    other = ["--for", "tensorrt-llm"]
    assert answer([*few, *other], capsys)["engine"] == "TensorRT-LLM PyTorch"
    assert answer([*few, *other, "--engine", "tensorrt-llm"], capsys)["engine"] == "TensorRT-LLM"


@pytest.mark.parametrize(
    ("more", "code"), [(["--together"], 0), (["--together", "--slo", "ttft=5ms"], 1)]
)
def test_the_screen_says_whose_times_they_are(more: list[str], code: int, capsys: Captured) -> None:
    few = [*WORDS, "--requests", "50", "--tp", "1", *more]
    assert "times\tvLLM's: neither --for nor --engine is given\n" in said(few, capsys, code)
    assert "times\tvLLM's\n" in said([*few, "--for", "vllm"], capsys, code)


def test_the_screen_fits_eighty_columns(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["plan", "serve", *WORDS]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any("what binds" in line for line in lines)


def said(words: list[str], capsys: Captured, code: int = 0) -> str:
    assert main(["plan", "serve", *words]) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_what_was_not_looked_at_is_not_said_to_be_dearer(capsys: Captured) -> None:
    shown = said([*WORDS, "--together"], capsys)
    assert "engines for prompts alone were not looked at (--together)" in shown
    assert "within 1.5 times" not in shown
    # Fewer plans to show are no fewer to compare with.
    words = ["llama3.1-405b", *WORDS[1:3], "--rate", "1", "--requests", "100", *SLOW]
    assert "the best without engines for prompts alone takes" in said(
        [*words, "--top", "1"], capsys
    )


def test_the_next_plan_of_a_kind_is_named_with_all_its_engines(capsys: Captured) -> None:
    words = ["llama3.1-70b", *WORDS[1:3], "--rate", "10", "--requests", "400", "--pp", "1"]
    words += ["--prompt", "8000", "--output", "200", "--slo", "ttft=2s,itl=15ms"]
    shown = said(words, capsys)
    assert "nothing without engines for prompts alone was found" in shown
    assert re.search(
        r"; next of its kind: \d+ × tp \d for prompts, \d+ × tp \d decode, \d+ GPUs\n", shown
    )


def test_what_binds_a_plan_of_one_engine_is_what_fewer_gpus_miss(capsys: Captured) -> None:
    words = ["llama3.1-405b", *WORDS[1:3], "--rate", "1", "--requests", "100", *SLOW]
    shown = said(words, capsys)
    assert re.search(r"what binds\twith 8 GPUs \(1 × tp 8\), \d+% of requests miss itl\n", shown)


def test_degrees_that_heads_do_not_divide_into_are_told_as_that(capsys: Captured) -> None:
    shown = said([*WORDS[:-4], "--tp", "3"], capsys, code=1)
    assert "3 does not divide the 32 attention heads" in shown
    assert "--tp, --pp, --dp and --ep may have other values" in shown


def test_what_comes_nearest_and_what_would_help_are_said(capsys: Captured) -> None:
    words = [*WORDS, "--slo", "itl=4.5ms", "--gpus", "4", "--precision", "fp8-blockwise"]
    shown = said(words, capsys, code=1)
    assert re.search(r"nearest\t\d GPUs?, .* of requests miss itl\n", shown)
    assert "--precision int4 takes less" in shown
    assert "--precision fp8 " not in shown
    assert answer(words, capsys, code=1)["best_effort"]["outcome"]["slo_violations"]["itl"] > 0.01


def test_nothing_that_does_is_the_answer_no(capsys: Captured) -> None:
    words = [*WORDS[:-6], "--gpus", "1", "--slo", "ttft=5ms"]
    found = answer(words, capsys, code=1)
    assert found["plans"] == []
    assert "alone" in found["infeasible"]["1 GPU"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["llama3.1-8b", "--cluster", "h200-superpod", "--rate", "1"], "--slo"),
        ([*WORDS[:3], "--concurrency", "4", "--slo", "ttft=1s"], "one rate"),
        ([*WORDS, "--rate", "inf"], "mw simulate serve --rate inf"),
        ([*WORDS, "--for", "vlm"], "vllm"),
        ([*WORDS, "--engine", "vlm"], "vllm"),
        ([*WORDS, "--for", "vllm", "--engine", "sglang"], "use --engine vllm"),
    ],
)
def test_faults_are_named(words: list[str], told: str, capsys: Captured) -> None:
    assert main(["plan", "serve", *words]) == 2
    assert told in capsys.readouterr().err
