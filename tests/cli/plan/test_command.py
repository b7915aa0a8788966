"""`mw plan`: the winner with its proof, its rivals, why it wins, and words to paste."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.render.progress import format_search_progress
from meshwright.predict.plan import find_plans
from meshwright.predict.plan.search.branch_and_bound import PlanProgress
from meshwright.spec.bridge import BRIDGES

Captured = pytest.CaptureFixture[str]

SMALL = [
    "llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--sequence-length", "8192",
    "--global-batch", "64", "--fix", "tp=1,2", "--cp", "1", "--fix", "pp=1,2",
]  # fmt: skip
WORK = "examples/llama3-70b.toml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == code
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def faults(words: list[str], capsys: Captured) -> str:
    """Return what is said about input that is wrong, having checked how it is said."""
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert printed.err.count("error:") == printed.err.count("hint:") > 0
    return printed.err


def screen(words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["plan", *words])
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def simulated(command: str, capsys: Captured) -> dict[str, Any]:
    words = shlex.split(command)
    assert words[:2] == ["mw", "simulate"]
    assert main([*words[1:], "--json"]) == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_the_winner_is_proved_and_the_fastest_of_its_rivals(capsys: Captured) -> None:
    found = answer(SMALL, capsys)
    steps = [plan["step_s"] for plan in found["plans"]]
    assert found["proved"]
    assert found["gap"] == 0
    assert found["bound_s"] == steps[0] == min(steps)
    assert steps == sorted(steps)


def test_the_differences_to_the_runner_up_add_up(capsys: Captured) -> None:
    found = answer(SMALL, capsys)
    first, second = found["plans"][:2]
    saved = sum(term["difference_s"] for term in found["terms"])
    assert saved == pytest.approx(second["step_s"] - first["step_s"])
    assert found["because"]


def test_every_command_reproduces_its_plan(capsys: Captured) -> None:
    for plan in answer([*SMALL, "--tokens", "1T"], capsys)["plans"]:
        again = simulated(plan["command"], capsys)
        assert again["step_s"] == plan["step_s"]
        assert again["memory_bytes"] == plan["memory_bytes"]


def test_a_command_reproduces_an_adapter(capsys: Captured) -> None:
    words = [*SMALL, "--adapter-rank", "16", "--top", "1"]
    (plan,) = answer(words, capsys)["plans"]
    assert "--adapter-rank 16" in plan["command"]
    assert simulated(plan["command"], capsys)["step_s"] == plan["step_s"]


def test_a_part_of_a_node_will_do(capsys: Captured) -> None:
    words = [
        "llama3.1-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "4",
        "--adapter-rank",
        "16",
        "--quick",
    ]
    found = answer([*words, "--top", "1"], capsys)
    assert found["plans"][0]["gpus"] == 4
    assert simulated(found["plans"][0]["command"], capsys)["step_s"] == pytest.approx(
        found["plans"][0]["step_s"]
    )


def test_fixed_fields_are_heeded_by_flag_and_by_fix(capsys: Captured) -> None:
    by_flag = answer([*SMALL, "--zero", "3", "--microbatch", "1"], capsys)
    by_fix = answer([*SMALL, "--fix", "zero=3", "--fix", "microbatch=1"], capsys)
    assert all(plan["layout"]["zero"] == 3 for plan in by_flag["plans"])
    assert [plan["layout"] for plan in by_flag["plans"]] == [
        plan["layout"] for plan in by_fix["plans"]
    ]


def test_a_fixed_field_that_decides_nothing_is_said(capsys: Captured) -> None:
    words = ["llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--quick", "--tp", "1"]
    main(["plan", *words, "--sequence-parallel", "--top", "1"])
    assert "fixing sequence_parallel did not decide" in capsys.readouterr().err


def test_memory_that_may_not_be_used_stays_free(capsys: Captured) -> None:
    whole, part = answer(SMALL, capsys), answer([*SMALL, "--max-memory", "0.7"], capsys)
    best = part["plans"][0]
    assert best["memory_bytes"] <= best["capacity_bytes"] < 0.71 * 80 * 2**30
    assert best["step_s"] >= whole["plans"][0]["step_s"]
    assert answer([*SMALL, "--max-memory", "70%"], capsys)["plans"][0]["layout"] == best["layout"]


def test_precision_words_are_what_the_gpu_has(capsys: Captured) -> None:
    found = answer([*SMALL, "--precision", "bf16,fp8", "--top", "1"], capsys)
    assert found["plans"][0]["layout"]["precision"] == "fp8-tensorwise"
    words = [word.replace("dgx-h100", "dgx-b200") for word in SMALL]
    found = answer([*words, "--precision", "fp8", "--top", "1"], capsys)
    assert found["plans"][0]["layout"]["precision"] == "mxfp8"


def test_a_work_file_gives_formats_and_not_degrees(tmp_path: Path, capsys: Captured) -> None:
    work = tmp_path / "mine.toml"
    work.write_text(
        'model = "llama3.1-8b"\ncluster = "h100-superpod"\ngpus = 16\n'
        '[layout]\ntp = 8\nmoment_precision = "bf16"\n'
        '[workload]\ntokens = "1T"\nsequence_length = 8192\nglobal_batch = 64\n'
    )
    found = answer([str(work), "--quick", "--top", "1"], capsys)
    layout = found["plans"][0]["layout"]
    assert found["plans"][0]["gpus"] == 16
    assert layout["moment_precision"] == "bf16"
    assert layout["tp"] < 8
    assert simulated(found["plans"][0]["command"], capsys)["step_s"] == found["plans"][0]["step_s"]


def test_a_command_names_the_file_of_a_model_that_no_catalog_has(
    tmp_path: Path, capsys: Captured
) -> None:
    main(["models", "qwen3-0.6b", "--as", "toml"])
    mine = tmp_path / "mine.toml"
    mine.write_text(capsys.readouterr().out.replace('name = "qwen3-0.6b"', 'name = "mine"'))
    words = [str(mine), "--cluster", "dgx-h100", "--gpus", "8", "--quick", "--top", "1"]
    (plan,) = answer(words, capsys)["plans"]
    assert str(mine) in plan["command"]
    assert simulated(plan["command"], capsys)["step_s"] == plan["step_s"]


def test_flags_change_the_gpus_and_the_batch_of_a_work_file(capsys: Captured) -> None:
    words = [WORK, "llama3.1-8b", "--gpus", "24", "--global-batch", "48", "--quick", "--top", "1"]
    (plan,) = answer(words, capsys)["plans"]
    assert plan["gpus"] == 24
    assert simulated(plan["command"], capsys)["step_s"] == plan["step_s"]


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        (["llama3.1-8b", "--gpus", "64", "--sequence-length", "8192"], 512),
        (["llama3.1-70b", "--gpus", "64", "--sequence-length", "8192"], 1024),
        (["llama3.1-405b", "--gpus", "2048", "--sequence-length", "8192"], 2048),
        (["llama3.1-8b", "--gpus", "24", "--sequence-length", "8192"], 384),
        (["llama3.1-8b", "--gpus", "8", "--adapter-rank", "16"], 128),
    ],
    ids=["small", "medium", "large", "three nodes", "fine-tuning"],
)
def test_a_batch_that_nobody_gave_is_usual_for_the_model(
    words: list[str], batch: int, capsys: Captured
) -> None:
    space = answer([*words, "--cluster", "h100-superpod", "--dry-run"], capsys)["space"]
    assert {row["field"]: row["may be"] for row in space}["global_batch"] == f"{batch:,}"


def test_what_was_filled_in_is_said(capsys: Captured) -> None:
    words = ["llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--quick", "--tp", "2"]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().err
    assert "--global-batch 1024" in said
    assert "--sequence-length 4096" in said


@pytest.mark.parametrize("words", [SMALL, [*SMALL, "--tokens", "1T", "--max-memory", "0.8"]])
def test_the_screen_fits_eighty_columns(
    words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = screen(words, capsys, monkeypatch)
    assert max(len(line.rstrip()) for line in lines) <= 80
    for start in ("layout ", "interval ", "memory ", "search      proved", "why ", "what binds"):
        assert any(line.startswith(start) for line in lines), start


def test_the_screen_has_every_family_and_the_command(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = screen([*SMALL, "--top", "3"], capsys, monkeypatch)
    assert [line[0] for line in lines if re.match(r"\d  +\d", line)] == ["1", "2", "3"]
    first = next(n for n, line in enumerate(lines) if line.startswith("mw simulate"))
    assert all(line.endswith("\\") for line in lines[first:-1])


@pytest.mark.parametrize("name", sorted(BRIDGES))
def test_a_framework_gets_only_what_it_can_run(name: str, capsys: Captured) -> None:
    words = [*SMALL, "--for", name, "--quick"]
    found = answer(words, capsys)
    best = found["plans"][0]
    text = found["export"]["text"]
    back = BRIDGES[name].import_config(text, gpus=8).layout
    kept = {"tp", "cp", "pp", "dp", "zero", "microbatch", "schedule", "overlap_gradients"}
    assert {field: best["layout"][field] for field in kept} == {
        field: getattr(back, field) for field in kept
    }


def test_a_framework_may_cost_the_proof_but_not_the_bound(capsys: Captured) -> None:
    found = answer([*SMALL, "--for", "megatron"], capsys)
    free = answer(SMALL, capsys)
    best = found["plans"][0]
    assert best["layout"]["schedule"] in ("1f1b", "interleaved")
    assert "mlp_act" not in best["layout"]["recompute_ops"]
    assert free["bound_s"] <= found["bound_s"] <= best["step_s"]
    assert found["proved"] == (found["bound_s"] == best["step_s"])


def test_what_does_not_fit_is_an_answer_of_no(capsys: Captured) -> None:
    words = ["llama3.1-70b", "--cluster", "dgx-h100", "--gpus", "8", "--quick", "--tp", "1"]
    found = answer([*words, "--global-batch", "8", "--zero", "0"], capsys, code=1)
    assert found["plans"] == []
    assert found["problems"][0]["fix"]


def test_ctrl_c_leaves_the_best_so_far(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(question: Any, **more: Any) -> Any:
        def report(progress: PlanProgress) -> None:
            if progress.best_step_s is not None:
                raise KeyboardInterrupt

        return find_plans(question, **{**more, "report": report})

    monkeypatch.setattr("meshwright.predict.plan.search.branch_and_bound._REPORT_S", 0.0)
    monkeypatch.setattr("meshwright.cli.plan.command.find_plans", stopped)
    found = answer(SMALL, capsys)
    assert not found["proved"]
    assert found["gap"] > 0
    assert found["plans"]


def test_progress_says_best_bound_and_gap() -> None:
    said = format_search_progress(
        PlanProgress(best_step_s=10.0, bound_s=9.0, expanded_nodes=7, open_nodes=3)
    )
    assert said == "best 10 s, bound 9 s, gap 10.0%"
    assert "3 waiting" in format_search_progress(
        PlanProgress(best_step_s=None, bound_s=9.0, expanded_nodes=7, open_nodes=3)
    )


def test_quiet_prints_the_command_alone(capsys: Captured) -> None:
    assert main(["plan", *SMALL, "--quiet", "--top", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("mw simulate llama3.1-8b --cluster h100-superpod --gpus 8")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["llama3.1-8b", "--cluster", "dgx-h100"], "--gpus: is missing"),
        (["llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "12"], "do not fill nodes of 8"),
        ([*SMALL, "--fix", "tq=8"], "no field of a layout named 'tq'"),
        ([*SMALL, "--fix", "microbatch"], "'microbatch' does not fix a field"),
        ([*SMALL, "--fix", "cp=2"], "--fix cp: cp is also given as a flag"),
        ([*SMALL, "--fix", "global_batch=8"], "use --global-batch"),
        ([*SMALL, "--precision", "bf16,fp4"], "has no fp4"),
        ([*SMALL, "--max-memory", "1.2"], "--max-memory: 1.2"),
        ([*SMALL, "--for", "megatorn"], "--for: there is no target named 'megatorn'"),
        ([*SMALL, "--for", "deepspeed", "--fix", "schedule=zb-v"], "schedule zb-v cannot be said"),
        ([*SMALL, "--top", "0"], "--top: 0 is too few"),
        ([*SMALL, "--fix", "zero=5"], "there is no ZeRO stage 5"),
        ([*SMALL, "--fix", "microbatch=0"], "--fix microbatch: 0 is too few"),
        ([*SMALL, "--fix", "recompute_layers=2"], "recompute_layers: is not for fixing"),
        ([*SMALL, "--fix", "optimizer=muon"], "--fix optimizer: formats of states"),
        ([*SMALL, "--max-memory", "70GiB"], "'70GiB' is not a share"),
        ([*SMALL, "--beam", "0"], "--beam: 0 is too few"),
        ([*SMALL, "--beam", "8", "--ray"], "--beam: is for a search in this process"),
        ([*SMALL, "--beam", "8", "--front"], "--beam: is for one question"),
        ([*SMALL, "--adapter-rank", "8", "--adapter-targets", "conv"], "conv"),
        ([*SMALL, "--front", "--sensitivity"], "are different questions"),
    ],
)
def test_bad_input_is_named_with_a_fix(words: list[str], fault: str, capsys: Captured) -> None:
    assert fault in faults(words, capsys)


def test_advice_can_be_pasted(capsys: Captured) -> None:
    words = ["llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--max-memory", "0.1"]
    problems = answer([*words, "--quick"], capsys, code=1)["problems"]
    advice = {problem["where"]: problem["fix"].removeprefix("use ") for problem in problems[1:]}
    for where in ("max_memory", "offload"):
        found = answer([*words, *shlex.split(advice[where]), "--quick", "--top", "1"], capsys)
        assert found["plans"]


def test_what_a_framework_runs_best_does_not_hang_on_how_much_is_shown(capsys: Captured) -> None:
    words = ["llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--for", "fsdp2", "--tp", "4"]
    steps = [
        answer([*words, "--quick", "--top", top], capsys)["plans"][0]["step_s"] for top in "13"
    ]
    assert steps[0] == steps[1]


def test_a_beam_says_what_it_may_have_missed(capsys: Captured) -> None:
    proved, found = answer(SMALL, capsys), answer([*SMALL, "--beam", "1"], capsys)
    assert found["bound_s"] <= proved["plans"][0]["step_s"] <= found["plans"][0]["step_s"]
    assert found["proved"] is (found["gap"] == 0.0)


def test_what_goes_to_the_host_is_searched_where_it_is_allowed(capsys: Captured) -> None:
    found = answer([*SMALL, "--fix", "offload=optimizer", "--top", "1"], capsys)
    assert found["plans"][0]["layout"]["offload"] == ["optimizer"]


def test_a_clusters_file_has_the_gpus_it_has(tmp_path: Path, capsys: Captured) -> None:
    main(["clusters", "h100-superpod", "--gpus", "16", "--as", "toml"])
    mine = tmp_path / "mine.toml"
    mine.write_text(capsys.readouterr().out.replace('name = "h100-superpod"', 'name = "mine"'))
    words = ["llama3.1-8b", "--cluster", str(mine), "--quick", "--top", "1", "--tp", "2"]
    (plan,) = answer(words, capsys)["plans"]
    assert plan["gpus"] == 16
    assert simulated(plan["command"], capsys)["step_s"] == plan["step_s"]
    assert "mine has 16 GPUs, not 32" in faults([*words, "--gpus", "32"], capsys)
