"""`mw plan` asked for many plans: sweeps, the front, sensitivity and inverse questions."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]

MODEL = ["llama3.1-8b", "--cluster", "dgx-h100"]
NARROW = [
    "--sequence-length", "8192", "--global-batch", "64", "--tp", "2", "--fix", "cp=1",
    "--fix", "pp=1,2", "--fix", "microbatch=1,2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *MODEL, *NARROW, *words, "--json"]) == code
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def faults(words: list[str], capsys: Captured) -> str:
    assert main(["plan", *MODEL, *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert printed.err.count("error:") == printed.err.count("hint:") > 0
    return printed.err


def widest(words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["plan", *MODEL, *NARROW, *words]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    return max(len(line.rstrip()) for line in lines)


def test_a_sweep_over_gpus_has_a_plan_for_each(capsys: Captured) -> None:
    found = answer(["--sweep", "gpus=8..32"], capsys)
    assert [point["value"] for point in found["points"]] == [8, 16, 32]
    rates = [point["plan"]["tokens_per_s"] for point in found["points"]]
    assert rates == sorted(rates)
    assert [point["plan"]["gpus"] for point in found["points"]] == [8, 16, 32]


@pytest.mark.parametrize("sweep", ["batch=32,64", "sequence-length=4Ki,8Ki"])
def test_a_sweep_over_what_is_asked_keeps_the_gpus(sweep: str, capsys: Captured) -> None:
    found = answer(["--gpus", "8", "--sweep", sweep], capsys)
    assert [point["plan"]["gpus"] for point in found["points"]] == [8, 8]
    first, second = (point["plan"]["step_s"] for point in found["points"])
    assert second > 1.5 * first


def test_a_value_that_nothing_fits_says_why(capsys: Captured) -> None:
    found = answer(["--gpus", "8", "--sweep", "batch=3,64"], capsys)
    first, second = found["points"]
    assert first["plan"] is None
    assert first["problems"][0]["fix"]
    assert second["plan"]["step_s"] > 0


def test_the_front_holds_nothing_that_another_beats(capsys: Captured) -> None:
    words = ["--gpus", "8,16", "--tokens", "1T", "--front"]
    points = answer(words, capsys)["points"]
    assert {point["gpus"] for point in points} == {8, 16}
    costs = [
        (point["time_s"], point["needed_bytes"], point["price"], point["gpus"]) for point in points
    ]
    for one in costs:
        assert not any(other != one and all(map(float.__le__, map(float, other), map(float, one)))
                       for other in costs)  # fmt: skip


def test_sensitivity_varies_four_things(capsys: Captured) -> None:
    found = answer(["--gpus", "8", "--sensitivity"], capsys)
    batches = [rate["value"] for rate in found["batch"]]
    assert 64 in batches
    assert all(found[name] for name in ("length", "gpus", "failures"))
    goodput = [rate["goodput"] for rate in found["failures"]]
    assert goodput[0] == max(goodput)


def test_a_deadline_is_met_with_the_fewest_gpus_tried(capsys: Captured) -> None:
    found = answer(["--tokens", "100B", "--deadline", "10d"], capsys)
    best = found["best"]
    assert best["long_run"]["calendar_s"] <= 10 * 86400
    for trial in found["tried"]:
        if trial["gpus"] < best["gpus"]:
            assert trial["long_run"] is None or trial["long_run"]["calendar_s"] > 10 * 86400
    words = shlex.split(found["command"])
    assert main([*words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == best["plan"]["step_s"]


def test_the_cheapest_is_no_dearer_than_the_fewest(capsys: Captured) -> None:
    words = ["--tokens", "100B", "--deadline", "10d"]
    fewest, cheapest = answer(words, capsys), answer([*words, "--cheapest"], capsys)
    assert cheapest["best"]["long_run"]["price"] <= fewest["best"]["long_run"]["price"]


def test_a_deadline_out_of_reach_is_an_answer_of_no(capsys: Captured) -> None:
    found = answer(["--tokens", "1T", "--deadline", "1h"], capsys, code=1)
    assert found["problems"][0]["where"] == "--deadline"
    assert found["problems"][0]["fix"]


@pytest.mark.parametrize("money", ["20k$", "$20k", "20000"])
def test_a_budget_is_not_overspent(money: str, capsys: Captured) -> None:
    best = answer(["--gpus", "8,16", "--budget", money], capsys)["best"]
    assert 0.99 * 20_000 < best["long_run"]["price"] <= 20_000


def test_the_largest_model_is_fast_enough(capsys: Captured) -> None:
    words = ["--gpus", "8", "--largest", "--min-mfu", "45%", "--fix", "zero=1,3"]
    found = answer(words, capsys)
    assert found["best"]["plan"]["mfu"] >= 0.45
    assert found["model"]["name"] == found["best"]["model"]
    assert found["command"] is None


def test_the_largest_of_a_family_has_a_command(capsys: Captured) -> None:
    words = ["--gpus", "8", "--largest", "--family", "--min-mfu", "0.45"]
    found = answer(words, capsys)
    assert f"mw simulate {found['best']['model']} " in found["command"]


@pytest.mark.parametrize(
    "words",
    [
        ["--sweep", "gpus=8..16"],
        ["--gpus", "8,16", "--tokens", "1T", "--front"],
        ["--gpus", "8", "--sensitivity"],
        ["--tokens", "100B", "--deadline", "10d"],
        ["--gpus", "8", "--largest", "--family"],
    ],
    ids=["sweep", "front", "sensitivity", "deadline", "largest"],
)
def test_every_screen_fits_eighty_columns(
    words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert widest(words, capsys, monkeypatch) <= 80


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--sweep", "gpus"], "does not say what to sweep"),
        (["--sweep", "gpu=8..16"], "no thing to sweep named 'gpu'"),
        (["--sweep", "gpus=16..8"], "ends before it begins"),
        (["--sweep", "gpus=8,12"], "--sweep: 12 GPUs"),
        (["--gpus", "8", "--sweep", "gpus=8"], "--gpus: the sweep itself"),
        (["--gpus", "8", "--front"], "--tokens: --front asks about a whole run"),
        (["--deadline", "30d"], "--tokens: --deadline asks about a whole run"),
        (["--deadline", "30 moons", "--tokens", "1T"], "--deadline: '30 moons'"),
        (["--deadline", "0d", "--tokens", "1T"], "--deadline: 0 is not above 0"),
        (["--budget", "2M$"], "--budget: needs --gpus or --deadline"),
        (["--budget", "much", "--gpus", "8"], "--budget: 'much'"),
        (["--gpus", "8", "--largest", "--min-mfu", "2"], "--min-mfu: 2 is not a share"),
        (["--gpus", "8", "--sensitivity", "--dry-run"], "--dry-run"),
        (["--gpus", "8", "--sensitivity", "--plot", "x.png"], "--sensitivity has no picture"),
    ],
)
def test_bad_input_is_named_with_a_fix(words: list[str], fault: str, capsys: Captured) -> None:
    assert fault in faults(words, capsys)
