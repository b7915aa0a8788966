"""`mw simulate rl`: one screen, the same as data, and faults by name."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.cli import main
from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.suite import encode_rows
from meshwright.observe.hardware.machine import Machine
from meshwright.policy.rollout import PLACEMENTS
from tests.observe.calibrate.synthetic import product_cases, row_of

Captured = pytest.CaptureFixture[str]
SMALL = [
    "llama3.1-8b", "--cluster", "h100-superpod", "--gpus", "16", "--prompts-per-step", "8",
    "--group-size", "4",
    "--output", "lognormal:400:0.6", "--steps", "2",
]  # fmt: skip


def answer(words: list[str], capsys: Captured) -> dict[str, Any]:
    assert main(["simulate", "rl", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_screen_fits_eighty_columns(
    placement: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["simulate", "rl", *SMALL, "--placement", placement]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert 8 <= len(lines) <= 30
    assert any("waits:" in line for line in lines)


def test_data_say_what_was_simulated_and_what_it_came_to(capsys: Captured) -> None:
    words = [*SMALL, "--placement", "async", "--rollout-gpus", "8", "--max-staleness", "2",
             "--tp", "2", "--train-tp", "2"]  # fmt: skip
    found = answer(words, capsys)
    setup, outcome = found["setup"], found["outcome"]
    assert (setup["engines"], setup["engine_tp"], setup["max_staleness"]) == (4, 2, 2)
    assert (setup["trainer_layout"]["tp"], setup["training_gpus"]) == (2, 8)
    assert outcome["step_s"] > 0
    assert outcome["max_staleness"] <= 2
    assert outcome["gpus"] == 16
    assert set(outcome["waits_s"]) == {"trainer", "engines"}
    assert outcome["length_skew_slowdown"] == pytest.approx(
        outcome["step_s"] / outcome["equal_length_step_s"] - 1
    )


def test_a_device_that_nobody_measured_is_told_to_make_times_rough(capsys: Captured) -> None:
    words = ["sorting-digits", "--cluster", "cpu-host"]
    assert main(["simulate", "rl", *words]) == 0
    shown = capsys.readouterr().out
    assert "costs\tbuilt-in constants, transferred from h100-80g-sxm" in shown
    assert "times\trough, and may be ten times off, as cpu-core has no measured" in shown
    found = answer(words, capsys)
    assert found["calibration"] == {"path": None, "source": None}
    assert "no measured calibration" in found["remarks"][0]


def test_how_to_make_times_less_rough_is_what_the_commands_take(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sorting-digits", "--cluster", "cpu-host"]
    (first, *_) = answer(words, capsys)["remarks"]
    told = re.search(r"mw (calibrate) bench\.jsonl (--gpu) (\S+)", first)
    assert told is not None
    lines = list[BenchRow]()
    for case in product_cases(30, precision="fp32"):
        flops = 2.0 * case.size("m") * case.size("n") * case.size("k")
        lines.append(msgspec.structs.replace(row_of(case, flops / 1e11), flops=flops))
    rows = tmp_path / "bench.jsonl"
    rows.write_bytes(encode_rows(Machine(device="AMD EPYC", cores=2), lines))
    monkeypatch.setenv("MESHWRIGHT_CALIBRATIONS", str(tmp_path))
    assert main([told[1], str(rows), told[2], told[3], "--quiet"]) == 0
    capsys.readouterr()
    found = answer(words, capsys)
    assert found["calibration"]["path"] == str(tmp_path / "cpu-core.toml")
    assert not any("rough" in each for each in found["remarks"])


def test_a_device_that_was_measured_is_not_called_rough(capsys: Captured) -> None:
    assert answer(SMALL, capsys)["remarks"] == []
    assert main(["simulate", "rl", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "costs\tbuilt-in constants, measured" in shown
    assert "rough" not in shown


def test_answers_are_as_long_as_they_are_said_to_be(capsys: Captured) -> None:
    words = [*SMALL[:-4], "--steps", "1", "--tp", "2", "--output"]
    steps = []
    for output in ("8000", "16000", "32000", "100-16000"):
        found = answer([*words, output], capsys)
        assert found["setup"]["rollout_batch"]["max_response_tokens"] == max(
            8192, int(output.rpartition("-")[2])
        )
        assert found["remarks"] == []
        steps.append(found["outcome"]["step_s"])
    assert steps[0] < steps[1] < steps[2] > steps[3]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (["lognormal:4000:0.8"], "19% of the answers that --output says are longer than 8,192"),
        (
            ["16000", "--max-response-tokens", "1000"],
            "100% of the answers that --output says are longer",
        ),
    ],
)
def test_answers_that_are_cut_are_told(output: list[str], said: str, capsys: Captured) -> None:
    words = [*SMALL[:-4], "--steps", "1", "--output", *output]
    (remark,) = answer(words, capsys)["remarks"]
    assert said in remark
    assert main(["simulate", "rl", *words]) == 0
    assert f"note: {said}" in capsys.readouterr().err


def test_steps_with_answers_of_equal_length_need_not_fit(capsys: Captured) -> None:
    # The trainer's layout just fits; mean answers fill its microbatches a little more.
    words = ["qwen3-8b", "--cluster", "h100-superpod", "--gpus", "32", "--prompt", "1024"]
    assert answer([*words, "--steps", "1"], capsys)["outcome"]["length_skew_slowdown"] > 0


def test_weights_that_have_no_room_when_they_come_are_told(capsys: Captured) -> None:
    words = ["qwen3-30b-a3b", "--cluster", "h100-superpod", "--gpus", "16", "--prompts-per-step",
             "8",
             "--group-size", "4", "--steps", "1"]  # fmt: skip
    (remark,) = answer(words, capsys)["remarks"]
    assert "while new weights come in a GPU would hold" in remark
    assert answer([*words, "--tp", "4"], capsys)["remarks"] == []


def test_a_reference_model_without_room_is_told(capsys: Captured) -> None:
    words = ["qwen2.5-14b", "--cluster", "h200-superpod", "--gpus", "8", "--train-tp", "1",
             "--train-pp", "1", "--steps", "1", "--max-response-tokens", "2048", "--output", "500",
             "--prompts-per-step", "8", "--group-size", "4"]  # fmt: skip
    plain = answer(words, capsys)
    assert plain["remarks"] == []
    there = plain["outcome"]["peak_bytes"]
    assert max(there.values()) < 141e9 * 1.07
    pulled = answer([*words, "--logprob-passes", "2"], capsys)
    (remark,) = pulled["remarks"]
    assert remark.startswith("while the trainer trains a GPU would hold")
    assert "a reference model lies beside the policy" in remark


def test_a_loop_whose_sides_keep_their_memory_is_told_where_that_is_too_much(
    tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "loop.toml"

    def words(layers: int, packed: int, placement: str) -> list[str]:
        network = {"layers": layers, "hidden": 4096, "heads": 32, "ffn": 14336}
        text = "".join(f"{name} = {value}\n" for name, value in network.items())
        asked = (
            'precision = "bf16"\nprompts_per_step = 1024\ngroup_size = 8\n'
            f"microbatch_tokens = {packed}\n"
        )
        file.write_text(f'placement = "{placement}"\n{asked}[network]\n{text}')
        return [str(file), "--cluster", "h200-superpod", "--steps", "1"]

    def said(placement: str) -> list[str]:
        remarks = answer(words(8, 60_000, placement), capsys)["remarks"]
        return [each for each in remarks if "would hold" in each]

    (remark,) = said("disaggregated")
    assert remark.startswith("while the trainer trains a GPU would hold")
    assert "--placement colocated takes turns" in remark
    assert said("colocated") == []
    # An engine beside a trainer that keeps half of a GPU is refused when it starts, and here.
    assert main(["simulate", "rl", *words(24, 1000, "disaggregated")]) == 2
    assert "what others keep there" in capsys.readouterr().err


def test_quiet_prints_the_step(capsys: Captured) -> None:
    assert main(["simulate", "rl", *SMALL, "--quiet"]) == 0
    assert float(capsys.readouterr().out) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3.1-8b", "--cluster", "h100-superpod"], "--gpus"),
        (["nosuch"], "'nosuch'"),
        ([*SMALL, "--rollout-gpus", "8"], "both sides have all GPUs"),
        ([*SMALL, "--placement", "disaggregated", "--rollout-gpus", "16"], "leave one side none"),
        ([*SMALL, "--placement", "disaggregated", "--rollout-gpus", "4"], "no whole nodes"),
        ([*SMALL, "--placement", "one_step_off", "--max-staleness", "3"], "means 1, not 3"),
        ([*SMALL, "--tp", "3"], "no whole engines of 3"),
        ([*SMALL, "--output", "long"], "--output"),
        ([*SMALL, "--train-ep", "2"], "--train-ep: llama3.1-8b has no experts"),
        ([*SMALL, "--train-tp", "3"], "hint: use --train-tp 2"),
        ([*SMALL, "--on-stale", "drop"], "with colocated no group gets too old"),
        ([*SMALL, "--on-stale", "drop"], "leave out --on-stale, or use --placement async"),
        (
            [*SMALL, "--placement", "async", "--max-staleness", "0", "--on-stale", "regenerate"],
            "with a staleness of 0",
        ),
        (["deepseek-v3", *SMALL[1:4], "32", "--tp", "16"], "--precision fp8"),
    ],
)
def test_faults_are_named(words: list[str], said: str, capsys: Captured) -> None:
    assert main(["simulate", "rl", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("error:") == printed.err.count("hint:") > 0
