"""Settings of `mw train --recipe grpo` are all that a simulation of the run needs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.flags.rl_run import find_rl_config, is_rl_run, read_rl_run
from meshwright.errors import InputError

Captured = pytest.CaptureFixture[str]
FILE = """
steps = 6
prompts_per_step = 16
group_size = 4
placement = "async"
max_staleness = 2

[recipe]
kind = "grpo"

[task]
digits = 12

[network]
max_positions = 64

[objective]
minibatches = 2
kl_coef = 0.1
importance_correction = "truncated"
"""


def simulated(words: list[str], capsys: Captured) -> dict[str, Any]:
    assert main(["simulate", "rl", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_file_says_all_of_a_step(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "loop.toml"
    path.write_text(FILE, encoding="utf-8")
    assert is_rl_run(str(path))
    loop = read_rl_run(str(path))
    assert (
        loop.rollout_parameters["updates_per_step"],
        loop.rollout_parameters["logprob_passes"],
    ) == (2, 2)
    assert loop.rollout_parameters["prompt_lengths"].values == (
        14,
    )  # a beginning, 12 digits, the end of a prompt
    assert loop.rollout_parameters["response_lengths"].values == (13,)
    found = simulated([str(path), "--cluster", "h200-superpod"], capsys)
    setup = found["setup"]
    assert (setup["placement"], setup["max_staleness"]) == ("async", 2)
    assert (setup["rollout_gpus"], setup["training_gpus"], setup["engine"]) == (1, 1, "Meshwright")
    assert (setup["rollout_batch"]["prompts_per_step"], setup["rollout_batch"]["group_size"]) == (
        16,
        4,
    )


def test_answers_to_questions_are_cut_where_the_run_would_cut_them(tmp_path: Path) -> None:
    path = tmp_path / "loop.toml"
    asked = "[task]\nname = 'questions'\ntrain = 'q.jsonl'\n"
    path.write_text(f"model = 'llama3-8b'\nmax_turns = 1\n{asked}", encoding="utf-8")
    assert read_rl_run(str(path)).rollout_parameters["max_response_tokens"] == 256
    path.write_text(f"model = 'llama3-8b'\nmax_tokens = 64\n{asked}", encoding="utf-8")
    assert read_rl_run(str(path)).rollout_parameters["max_response_tokens"] == 64


def test_the_trainer_has_the_layout_of_the_file(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "loop.toml"
    path.write_text(f"{FILE}\n[layout]\ntp = 2\ndp = 2\nzero = 3\n", encoding="utf-8")
    words = [str(path), "--cluster", "h200-superpod"]
    setup = simulated(words, capsys)["setup"]
    assert (setup["rollout_gpus"], setup["training_gpus"]) == (1, 4)
    assert read_rl_run(str(path)).layout.zero == 3
    found = simulated([*words, "--placement", "disaggregated"], capsys)
    assert (found["setup"]["rollout_gpus"], found["setup"]["training_gpus"]) == (1, 4)


def test_an_engine_of_the_first_rank_is_said_to_have_a_device(
    tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "loop.toml"
    path.write_text('[recipe]\nkind = "grpo"\n[layout]\ndp = 2\n', encoding="utf-8")
    found = simulated([str(path), "--cluster", "h200-superpod"], capsys)
    assert (found["setup"]["rollout_gpus"], found["setup"]["training_gpus"]) == (1, 2)
    assert any("device of its own" in remark for remark in found["remarks"])


def test_one_device_holds_both_sides_of_a_synchronous_loop(capsys: Captured) -> None:
    found = simulated(["sorting-digits", "--cluster", "cpu-host", "--no-calibration"], capsys)
    outcome = found["outcome"]
    assert outcome["gpus"] == 1
    assert outcome["memory_phases_s"] == 0
    assert outcome["tokens"] == 64 * 8 * (6 + 5)
    shorter = ["--cluster", "cpu-host", "--prompts-per-step", "8", "--no-calibration"]
    fewer = simulated(["sorting-digits", *shorter], capsys)["outcome"]
    assert fewer["tokens"] == 8 * 8 * (6 + 5)


def test_a_run_is_held_against_its_own_steps_and_has_a_page(
    tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip("torch", reason="runs the loop")
    words = [
        "sorting-digits",
        "steps=2",
        "prompts_per_step=4",
        "group_size=2",
        "evaluate.num_prompts=8",
    ]
    assert main(["train", "--recipe", "grpo", *words, "--output-dir", str(tmp_path / "run")]) == 0
    assert "report.html" in capsys.readouterr().err
    run = str(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for told in ("held out, sampled", "sampled, after", "waits: groups", "reward (%"):
        assert told in page
    assert is_rl_run(run)
    assert find_rl_config(run).prompts_per_step == 4
    found = simulated([run, "--cluster", "cpu-host", "--no-calibration"], capsys)
    assert [row["what"] for row in found["comparison"]] == [
        "the step", "trains", "sends weights", "draws",
    ]  # fmt: skip


def test_a_task_that_a_file_names_is_not_loaded(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_a_file.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "loop.toml"
    text = 'model = "llama3.2-1b"\nplacement = "colocated"\n[task]\nname = "named_by_a_file:it"\n'
    path.write_text(text, encoding="utf-8")
    words = ["simulate", "rl", str(path), "--cluster", "h200-superpod", "--steps", "1"]
    assert main([*words, "--prompts-per-step", "4", "--prompt", "64", "--output", "32"]) == 0
    assert "named_by_a_file:it is not loaded" in capsys.readouterr().err
    path.write_text(text.partition("\n")[2], encoding="utf-8")
    assert main(words) == 2
    assert "task.name: is not loaded" in capsys.readouterr().err


OWN_TASK = """
from meshwright.run.posttrain.rollout.sorting_task.sorting_digits import SortingDigits

def it(part):
    task = SortingDigits(digits=4, part=part)
    task.vocab_size, task.stop_token_ids = task.words.vocab, (task.words.end,)
    return task
"""


def test_a_run_of_an_own_task_says_its_vocabulary_itself(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="runs the loop")
    module = tmp_path / "task_of_a_run.py"
    module.write_text(OWN_TASK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path, run = tmp_path / "loop.toml", tmp_path / "run"
    path.write_text(
        'steps = 2\nprompts_per_step = 4\ngroup_size = 2\n[task]\nname = "task_of_a_run:it"\n',
        encoding="utf-8",
    )
    assert main(["train", "--recipe", "grpo", str(path), "--output-dir", str(run)]) == 0
    module.write_text("raise SystemExit('it was run')\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "task_of_a_run")
    loop = read_rl_run(str(run))
    assert (loop.model.vocab, loop.model.hidden) == (14, 64)
    capsys.readouterr()
    found = simulated([str(run), "--cluster", "cpu-host", "--no-calibration"], capsys)
    assert found["setup"]["rollout_batch"]["prompt_lengths"]["values"] == [6]
    # A checkpoint that was cut short says nothing; the one before it does.
    newest = max((run / "checkpoints").iterdir())
    (newest / "checkpoint.json").write_text("{", encoding="utf-8")
    assert read_rl_run(str(run)).model.vocab == 14
    for record in (run / "checkpoints").glob("*/checkpoint.json"):
        record.unlink()
    with pytest.raises(InputError, match="its vocabulary is not known"):
        read_rl_run(str(run))


def test_other_files_are_no_loops(tmp_path: Path, capsys: Captured) -> None:
    work = tmp_path / "work.toml"
    work.write_text('model = "llama3.1-8b"\n[layout]\ntp = 2\n', encoding="utf-8")
    assert not is_rl_run(str(work))
    assert not is_rl_run("llama3.1-8b")
    words = ["sorting-digits", "--cluster", "h200-superpod", "--placement", "async"]
    for flag in ("--gpus", "--tp", "--train-pp"):
        assert main(["simulate", "rl", *words, flag, "1"]) == 2
        assert f"{flag}: the file says which devices a loop has" in capsys.readouterr().err


def test_captured_prompts_let_an_engine_that_never_waits_draw_faster(
    tmp_path: Path, capsys: Captured
) -> None:
    took = []
    for tokens in (0, 4096):
        path = tmp_path / f"{tokens}.toml"
        path.write_text(f"max_cudagraph_capture_size = {tokens}\n{FILE}", encoding="utf-8")
        found = simulated([str(path), "--cluster", "h200-superpod"], capsys)
        took.append(found["outcome"]["step_s"])
    assert took[1] < 0.9 * took[0]


def test_workers_have_devices_of_their_own(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "loop.toml"
    path.write_text(
        FILE + "\n[workers]\nnum_workers = 3\ntensor_parallel_size = 2\n", encoding="utf-8"
    )
    assert read_rl_run(str(path)).limits.max_num_seqs == 6 * 4  # a third of 16 prompts, rounded up
    found = simulated([str(path), "--cluster", "h200-superpod"], capsys)
    setup = found["setup"]
    assert (setup["engines"], setup["engine_tp"], setup["training_gpus"]) == (3, 2, 1)
    assert found["outcome"]["gpus"] == 7
    words = [str(path), "--cluster", "h200-superpod", "--gpus", "2", "--tp", "1", "--json"]
    assert main(["plan", "rl", *words]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["setup"]["rollout_batch"]["prompts_per_step"] == 16


def test_an_adapter_of_a_file_is_simulated(tmp_path: Path, capsys: Captured) -> None:
    path, words = tmp_path / "loop.toml", ["--cluster", "h200-superpod"]
    path.write_text(FILE.replace("async", "colocated").replace("max_staleness = 2", ""))
    whole = simulated([str(path), *words], capsys)
    path.write_text(
        f'{path.read_text()}\n[adapter]\nrank = 4\ntarget_modules = ["q_proj", "o_proj"]\n'
    )
    small = simulated([str(path), *words], capsys)
    assert small["setup"]["rollout_batch"]["adapter"] == {"rank": 4, "targets": ["qkv", "out"]}
    for doing, held in small["outcome"]["peak_bytes"].items():
        assert held <= whole["outcome"]["peak_bytes"][doing]
    assert small["outcome"]["sync_s"] < whole["outcome"]["sync_s"]
    assert any("adapter adds to an engine" in remark for remark in small["remarks"])
    rank = simulated([str(path), *words, "--adapter-rank", "8"], capsys)["setup"]["rollout_batch"]
    assert rank["adapter"]["rank"] == 8, "flags replace what the file says"


def test_a_run_that_only_trains_and_too_small_a_cluster_are_told(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "config.toml").write_text('steps = 2\nreplay = "drawn.jsonl"\n', encoding="utf-8")
    assert main(["simulate", "rl", str(tmp_path), "--cluster", "cpu-host"]) == 2
    assert "only trains, is no loop" in capsys.readouterr().err
    (tmp_path / "loop.toml").write_text("[workers]\nnum_workers = 2\n", encoding="utf-8")
    assert main(["simulate", "rl", str(tmp_path / "loop.toml"), "--cluster", "cpu-host"]) == 2
    assert "2 engines of 1 are 3 devices, more than cpu-host" in capsys.readouterr().err


def test_a_fault_of_a_file_is_not_told_as_that_of_a_flag(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "loop.toml"
    path.write_text(FILE.replace("async", "nowhere"), encoding="utf-8")
    assert main(["simulate", "rl", str(path), "--cluster", "h200-superpod"]) == 2
    assert f"{path}: placement: 'nowhere' is not one of" in capsys.readouterr().err
