"""`mw whatif`: a chart of one thing varied, its reasons, its data and its picture."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]
WORK = "examples/llama3-70b.toml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["whatif", *words, "--json"]) == code
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_values_become_cases_beside_the_baseline(capsys: Captured) -> None:
    found = answer([WORK, "nic=x2,x4", "tp=8"], capsys)
    assert found["schema"] == "meshwright.whatif/2"
    assert [case["value"] for case in found["cases"]] == ["x2 (100 GB/s)", "x4 (200 GB/s)", "8"]
    assert found["cases"][2]["dependent_changes"] == {"dp": 16}
    base = found["baseline"]["step_s"]
    for case in found["cases"]:
        assert case["change"] == pytest.approx(case["step_s"] / base - 1)


def test_the_baseline_is_what_simulate_says(capsys: Captured) -> None:
    base = answer([WORK, "nic=x2"], capsys)["baseline"]
    assert main(["simulate", WORK, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    for name in ("step_s", "mfu", "memory_bytes", "dollars_per_trillion_tokens"):
        assert base[name] == alone[name]


def test_a_flag_says_the_same_as_a_word(capsys: Captured) -> None:
    assert answer([WORK, "microbatch=2"], capsys) == answer(
        [WORK, "--vary", "microbatch=2"], capsys
    )


def test_flags_describe_the_work_and_words_vary_it(capsys: Captured) -> None:
    words = ["llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "64", "--zero", "1", "microbatch=1"]
    found = answer(words, capsys)
    assert found["cases"][0]["step_s"] == found["baseline"]["step_s"]


def test_with_nothing_to_vary_the_usual_things_are(capsys: Captured) -> None:
    names = {case["parameter"] for case in answer([WORK], capsys)["cases"]}
    assert {"nic", "nvlink_domain", "precision", "microbatch"} <= names


def test_a_value_that_cannot_be_is_in_the_chart_with_its_reason(capsys: Captured) -> None:
    assert main(["whatif", WORK, "tp=3,8", "precision=nvfp4"]) == 0
    printed = capsys.readouterr().out
    assert "tp 3\t–\t\tcannot be" in printed
    assert "512 GPUs are no multiple of tp × cp × pp = 12" in printed
    assert "a h100-80g-sxm has no nvfp4" in printed
    cases = answer([WORK, "tp=3,8"], capsys)["cases"]
    assert [bool(case["problems"]) for case in cases] == [True, False]


def test_nothing_that_can_be_ends_with_one(capsys: Captured) -> None:
    assert answer([WORK, "tp=3"], capsys, code=1)["cases"][0]["problems"]


def test_what_does_not_fit_is_marked(capsys: Captured) -> None:
    assert main(["whatif", WORK, "memory=40GB"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"\d!", printed.out)
    assert "! too much" in printed.err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([WORK, "nik=x2"], "did you mean nic"),
        ([WORK, "--vary", "nic"], "write it like nic=x2,x4"),
        ([WORK, "nic="], "write it like nic=x2,x4"),
        ([WORK, "tp=2", "--tp", "3"], "--tp: 3 does not divide"),
        (["nic=x2"], "model: is missing"),
        ([WORK, "nic=x2", "--svg", "README.md/chart.svg"], "README.md, which is a file"),
    ],
)
def test_a_mistake_is_named(words: list[str], fault: str, capsys: Captured) -> None:
    assert main(["whatif", *words]) == 2
    printed = capsys.readouterr()
    assert fault in printed.err
    assert "Traceback" not in printed.err


def test_bars_are_to_one_scale(capsys: Captured) -> None:
    assert main(["whatif", WORK, "gpus=x2,/2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    base, faster, slower = [len(row[3]) for row in rows if len(row) == 8][1:]
    assert faster < base < slower == 12


def test_the_chart_fits_eighty_columns(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["whatif", WORK, "tp=1,2,3", "memory_bandwidth=x2", "schedule=zb-h1"]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_quiet_prints_a_step_for_each_value(capsys: Captured) -> None:
    assert main(["whatif", WORK, "microbatch=1,2", "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["microbatch=1", "microbatch=2"]
    assert all(float(line.split("\t")[1]) > 0 for line in lines)


def test_the_picture_has_a_row_for_every_value(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "chart.svg"
    assert main(["whatif", WORK, "tp=2,3", "--svg", str(out)]) == 0
    drawn = ET.parse(out).getroot()
    texts = [node.text or "" for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"as it is", "tp 2, dp 64", "tp 3"} <= set(texts)
    assert any(text.startswith("cannot be: 512 GPUs") for text in texts)
    assert str(out) in capsys.readouterr().err
