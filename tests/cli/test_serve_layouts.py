"""A layout is the same to `mw plan serve` and to `mw simulate serve`."""

import json
from typing import Any

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]
ASKED = [
    "deepseek-v3", "--cluster", "h200-superpod", "--precision", "fp8-blockwise", "--rate", "4",
    "--prompt", "1000", "--output", "100", "--requests", "100", "--slo", "ttft=1s,itl=50ms",
]  # fmt: skip
DEGREES = ("tp", "pp", "dp", "ep")


def answer(words: list[str], capsys: Captured) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def simulated(words: list[str], capsys: Captured) -> dict[str, Any]:
    found: dict[str, Any] = answer(["simulate", "serve", *ASKED[:-2], *words], capsys)["fleet"]
    return found


@pytest.mark.parametrize(
    "degrees", [["--tp", "2", "--dp", "4"], ["--tp", "2", "--dp", "2", "--pp", "2,1"]]
)
def test_what_is_planned_can_be_simulated_and_comes_to_the_same(
    degrees: list[str], capsys: Captured
) -> None:
    plan = answer(["plan", "serve", *ASKED, *degrees, "--gpus", "16"], capsys)["plans"][0]
    fleet = plan["fleet"]
    words = [f"--{name}={fleet['layout'][name]}" for name in DEGREES]
    if fleet["prefill_layout"]:
        words += [f"--prefill-{name}={fleet['prefill_layout'][name]}" for name in DEGREES]
        words += ["--disaggregate", f"{fleet['prefill_replicas']}:{fleet['replicas']}"]
    else:
        words += ["--replicas", str(fleet["replicas"])]
    config = fleet["scheduler_config"]
    words += [f"--max-num-batched-tokens={config['max_num_batched_tokens']}"]
    words += [f"--max-num-seqs={config['max_num_seqs']}"]
    again = answer(["simulate", "serve", *ASKED, *words], capsys)
    assert again["fleet"] == fleet
    assert again["runs"][0]["latency"] == plan["outcome"]["latency"]


def test_without_ep_experts_are_cut_over_all_gpus_of_a_stage(capsys: Captured) -> None:
    def layout(*words: str) -> dict[str, int]:
        found: dict[str, int] = simulated([*words], capsys)["layout"]
        return found

    assert layout("--tp", "2", "--dp", "4")["expert_tp"] == 8
    spread = layout("--tp", "2", "--dp", "4", "--ep", "8")
    assert (spread["ep"], spread["expert_tp"]) == (8, 1)


def test_engines_for_prompts_have_a_layout_of_their_own(capsys: Captured) -> None:
    words = ["--dp", "8", "--disaggregate", "1:1", "--prefill-tp", "2", "--prefill-dp", "4"]
    fleet = simulated(words, capsys)
    assert fleet["layout"] == {"tp": 1, "pp": 1, "dp": 8, "ep": 1, "expert_tp": 8}
    assert fleet["prefill_layout"] == {"tp": 2, "pp": 1, "dp": 4, "ep": 1, "expert_tp": 8}
    first, own = fleet["prefill_scheduler_config"], fleet["scheduler_config"]
    assert first["max_num_batched_tokens"] * 2 == own["max_num_batched_tokens"]
    assert simulated(["--dp", "8"], capsys)["prefill_layout"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dp", "8", "--prefill-pp", "2"], "--disaggregate"),
        (
            ["--dp", "8", "--ep", "8", "--disaggregate", "1:1", "--prefill-dp", "6"],
            "use --prefill-ep 6",
        ),
        (["--dp", "8", "--disaggregate", "1:1", "--prefill-tp", "3"], "use --prefill-tp 2"),
        (["--dp", "8", "--pp", "99"], "--pp: 61 layers do not fill 99 stages"),
    ],
)
def test_a_layout_for_prompts_that_cannot_be_is_named(
    words: list[str], said: str, capsys: Captured
) -> None:
    assert main(["simulate", "serve", *ASKED, *words]) == 2
    assert said in capsys.readouterr().err
