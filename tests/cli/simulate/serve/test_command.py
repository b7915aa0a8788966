"""`mw simulate serve`: one screen, the same as data, and a timeline that others read."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.timeline import read_timeline

Captured = pytest.CaptureFixture[str]
SMALL = ["llama3.1-8b", "--cluster", "h200-superpod", "--requests", "200"]
RATE = [*SMALL, "--rate", "20", "--prompt", "300", "--output", "50"]
LONGEST = "--longest-first"


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["simulate", "serve", *words, "--json"]) == code
    read_: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read_


def faults(words: list[str], capsys: Captured) -> str:
    assert main(["simulate", "serve", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("error:") == printed.err.count("hint:") > 0
    return printed.err


@pytest.mark.parametrize(
    "words",
    [
        [*RATE, "--slo", "ttft=500ms,itl=40ms"],
        [*SMALL, "--rate", "1,4,16,64", "--slo", "ttft=10s"],
        [*RATE, "--tp", "2", "--disaggregate", "1:1", "--prefill-tp", "4"],
        ["deepseek-v3", "--cluster", "h200-superpod", "--dp", "8", "--ep", "8", "--precision",
         "fp8-blockwise", "--concurrency", "64", "--requests", "200"],
    ],
    ids=["one", "many", "apart", "experts"],
)  # fmt: skip
def test_the_screen_fits_eighty_columns(
    words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["simulate", "serve", *words]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert 8 <= len(lines) <= 30


def test_data_say_what_was_simulated_and_what_it_came_to(capsys: Captured) -> None:
    found = answer([*RATE, "--tp", "2", "--replicas", "2", "--kv-cache-dtype", "fp8"], capsys)
    fleet, (run,) = found["fleet"], found["runs"]
    assert (fleet["gpus"], fleet["replicas"], fleet["layout"]["tp"]) == (4, 2, 2)
    assert run["requests"] == 200
    assert set(run["latency"]) == {"ttft", "itl", "tpot", "e2e"}
    assert run["slo_attainment"] is None


def test_a_missed_objective_is_the_answer_no(capsys: Captured) -> None:
    assert answer([*RATE, "--slo", "ttft=1ms"], capsys, code=1)["runs"][0]["slo_attainment"] == 0
    answer([*RATE, "--slo", "ttft=1ms", "--slo-attainment", "0"], capsys)


def test_the_same_seed_gives_the_same_answer(capsys: Captured) -> None:
    assert answer(RATE, capsys) == answer(RATE, capsys)
    assert answer(RATE, capsys) != answer([*RATE, "--seed", "1"], capsys)


def test_who_writes_longest_may_begin_first(capsys: Captured) -> None:
    words = [*SMALL, "--rate", "inf", "--requests", "60", "--output", "1-300"]
    words += ["--max-num-seqs", "8", "--prompt", "16"]
    (given,), (sorted_,) = (answer([*words, *more], capsys)["runs"] for more in ([], [LONGEST]))
    assert sorted_["output_tokens_per_s"] > given["output_tokens_per_s"]
    assert sorted_["requests"] == given["requests"]
    assert "come over time begin as they come" in faults([*RATE, LONGEST], capsys)


def test_a_tp_that_heads_cannot_share_is_refused_with_one_that_they_can(capsys: Captured) -> None:
    said = faults([*RATE, "--tp", "3"], capsys)
    assert "32 attention heads" in said
    assert "8 key-value heads" in said
    assert "use --tp 2" in said


def test_a_cache_that_holds_no_request_is_a_fault(capsys: Captured) -> None:
    said = faults([*RATE, "--num-gpu-blocks-override", "2"], capsys)
    # 300 tokens of prompts and 49 of answers, in blocks of 16; the last one is not kept.
    assert "the shortest takes 22" in said
    assert "use --num-gpu-blocks-override 22" in said
    answer([*RATE, "--num-gpu-blocks-override", "22"], capsys)


def test_limits_change_what_happens(capsys: Captured) -> None:
    few = answer([*RATE, "--max-num-seqs", "2", "--num-gpu-blocks-override", "100"], capsys)
    assert few["fleet"]["scheduler_config"]["max_num_seqs"] == 2
    assert few["runs"][0]["mean_decode_batch"] <= 2
    assert few["runs"][0]["max_kv_usage"] > 0.3


def test_a_trace_is_replayed(tmp_path: Path, capsys: Captured) -> None:
    trace = tmp_path / "asked.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,100,20\n")
    words = ["llama3.1-8b", "--cluster", "h200-superpod", "--trace", str(trace)]
    assert answer(words, capsys)["runs"][0]["requests"] == 2


def test_the_timeline_has_the_steps_of_every_engine_and_every_request(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "kept"
    answer([*RATE, "--replicas", "2", "--timeline", str(folder)], capsys)
    timeline = read_timeline(folder)
    assert timeline.ranks == (0, 1)
    names = timeline.string_column("name")
    counts = {name: int((names.codes == code).sum()) for code, name in enumerate(names.values)}
    assert counts["until the first token"] == counts["answer"] == 200
    assert counts["decode"] > 0
    drawn = tmp_path / "kept.json.gz"
    answer([*RATE, "--timeline", str(drawn), "--plot", str(tmp_path / "load.svg")], capsys)
    assert drawn.stat().st_size > 1000
    assert "KV cache in use" in (tmp_path / "load.svg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3.1-8b"], "mw clusters"),
        ([*RATE, "--engine", "vlm"], "vllm"),
        ([*RATE, "--disaggregate", "2"], "2:1"),
        ([*RATE, "--disaggregate", "0:1"], "1:1"),
        ([*RATE, "--disaggregate", "1:1", "--replicas", "2"], "one of them"),
        ([*RATE, "--prefill-tp", "2"], "--disaggregate"),
        ([*SMALL[:3], "--concurrency", "4", "--duration", "60s"], "--requests"),
        ([*SMALL[:3], "--rate", "0.001", "--duration", "1s"], "longer"),
        ([*RATE, "--slo", "tfft=1s"], "ttft"),
        ([*SMALL, "--rate", "1,2", "--timeline", "kept"], "one rate"),
        (["deepseek-v3", "--cluster", "h200-superpod", "--rate", "1"], "--tp"),
    ],
)
def test_faults_are_named_with_what_would_help(
    words: list[str], said: str, capsys: Captured
) -> None:
    assert said in faults(words, capsys)


def test_two_words_are_one_command(capsys: Captured) -> None:
    assert main(["simulate", "serve", "--help"]) == 0
    assert "mw simulate serve MODEL" in capsys.readouterr().out
    assert main(["completion", "words", "--", "simulate", "se"]) == 0
    assert capsys.readouterr().out.split() == ["serve"]
    assert main(["completion", "words", "--", "simulate", "serve", "--disagg"]) == 0
    assert capsys.readouterr().out.split() == ["--disaggregate"]
