"""`mw plan rl`: the shortest step first, with its reason."""

import json
import re
import sys

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]
SMALL = [
    "llama3.1-8b", "--cluster", "h100-superpod", "--gpus", "16", "--prompts-per-step", "8",
    "--group-size", "4",
    "--output", "lognormal:400:0.6", "--tp", "1,2",
]  # fmt: skip


def test_plans_are_ranked_and_data_say_the_split(capsys: Captured) -> None:
    assert main(["plan", "rl", *SMALL, "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [one["outcome"]["step_s"] for one in found["plans"]]
    assert len(steps) == 3
    assert steps == sorted(steps)
    assert found["simulations"] >= 8
    for one in found["plans"]:
        setup = one["setup"]
        apart = setup["rollout_gpus"] + setup["training_gpus"]
        assert apart == (32 if setup["placement"] == "colocated" else 16)


def test_a_simulation_of_the_plan_says_the_same(capsys: Captured) -> None:
    words = [*SMALL[:-2], "--placement", "async", "--tp", "2"]
    assert main(["plan", "rl", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    rollout = str(plan["setup"]["rollout_gpus"])
    assert main(["simulate", "rl", *words, "--rollout-gpus", rollout, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["outcome"]["step_s"] == plan["outcome"]["step_s"]
    assert alone["setup"]["trainer_layout"] == plan["setup"]["trainer_layout"]


def test_an_adapter_is_planned_without_states_of_frozen_weights(capsys: Captured) -> None:
    words = [*SMALL[:-2], "--gpus", "8", "--tp", "1", "--placement", "colocated"]
    assert main(["plan", "rl", *words, "--adapter-rank", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("mw train has an adapter on one training device" in one for one in found["remarks"])
    small = found["plans"][0]
    assert main(["plan", "rl", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any("adapter" in one for one in found["remarks"])
    whole = found["plans"][0]
    assert small["setup"]["rollout_batch"]["adapter"]["rank"] == 16
    assert small["outcome"]["peak_bytes"]["training"] < whole["outcome"]["peak_bytes"]["training"]
    assert small["outcome"]["sync_s"] < whole["outcome"]["sync_s"] / 20


def test_what_a_plan_leaves_out_is_told_with_it(capsys: Captured) -> None:
    words = ["qwen3-30b-a3b", *SMALL[1:9], "--tp", "1", "--placement", "colocated"]
    assert (
        main(["plan", "rl", *words, "--output", "4000", "--max-response-tokens", "400", "--json"])
        == 0
    )
    cut, held = json.loads(capsys.readouterr().out)["remarks"]
    assert cut.startswith("100% of the answers")
    assert held.startswith("while new weights come in a GPU would hold")


def test_the_screen_fits_eighty_columns(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert main(["plan", "rl", *SMALL]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.lstrip().startswith("why") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (SMALL[:3], "--gpus"),
        ([*SMALL, "--placement", "colocatd"], "colocated"),
        ([*SMALL[:4], "1", "--placement", "colocated"], "nothing fits on"),
        (["llama3.1-70b", *SMALL[1:4], "16", "--tp", "1,8"], "let 32 GPUs train"),
        ([*SMALL[:-1], "3"], "engines of 3 do not divide them"),
    ],
)
def test_faults_are_named(words: list[str], said: str, capsys: Captured) -> None:
    assert main(["plan", "rl", *words]) == 2
    assert said in capsys.readouterr().err
