"""`mw simulate`: one screen, the same as data, and every fault of bad input named at once."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]

WORK = "examples/llama3-70b.toml"
LLAMA_405B = [
    "llama3-405b", "--cluster", "h100-superpod", "--gpus", "16384", "--tp", "8", "--pp", "16",
    "--cp", "1",
]  # fmt: skip
SPLIT = ["--stage-layers", "7," + "8," * 14 + "7"]
EVERY_PART = [
    "deepseek-v3", "--cluster", "h100-superpod", "--gpus", "2048", "--tp", "2", "--cp", "2",
    "--pp", "16", "--ep", "64", "--expert-tp", "1", "--zero", "1", "--precision", "fp8-blockwise",
    "--stage-layers", "4," * 13 + "3,3,3", "--global-batch", "15360", "--recompute", "full",
]  # fmt: skip


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == code
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def faults(words: list[str], capsys: Captured) -> str:
    """Return what is said about input that is wrong, having checked how it is said."""
    assert main(["simulate", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert printed.err.count("error:") == printed.err.count("hint:") > 0
    return printed.err


def screen(words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["simulate", *words])
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize(
    "words",
    [[WORK], [*LLAMA_405B, *SPLIT], EVERY_PART, ["qwen3-0.6b", "--cluster", "dgx-h100"]],
    ids=["interleaved", "too large", "every part", "one GPU"],
)
def test_the_screen_fits_eighty_columns_and_about_forty_lines(
    words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = screen(words, capsys, monkeypatch)
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert len(lines) <= 43


def test_a_deep_pipeline_is_folded(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = ["--pp", "64", "--stage-layers", "1," + "2," * 62 + "1", "--zero", "1"]
    lines = screen([*LLAMA_405B, *deep], capsys, monkeypatch)
    stages = [line for line in lines if re.match(r" *\d+–\d+\*? +\d", line)]
    assert 1 < len(stages) <= 6
    assert sum("*" in line for line in stages) == 1


def test_the_bar_has_the_shares_of_the_parts(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = answer([WORK], capsys)
    lines = screen([WORK], capsys, monkeypatch)
    bar = lines[lines.index("where the step goes") + 1]
    assert len(bar) == 78
    assert bar.count("█") == round(78 * shares["compute_s"] / shares["step_s"])


def test_parts_add_up_to_the_step(capsys: Captured) -> None:
    found = answer([WORK], capsys)
    parts = ("compute", "recompute", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer")
    assert sum(found[f"{part}_s"] for part in parts) == pytest.approx(found["step_s"])


def test_stages_are_all_in_the_data(capsys: Captured) -> None:
    found = answer([WORK], capsys)
    assert [stage["stage"] for stage in found["stages"]] == [0, 1, 2, 3]
    worst = found["stages"][found["worst_stage"]]
    assert worst["total_bytes"] == found["memory_bytes"] <= found["capacity_bytes"]


def test_every_change_gives_flags_that_bring_its_step(capsys: Captured) -> None:
    found = answer([WORK], capsys)
    assert len(found["changes"]) == 3
    for change in (*found["changes"], found["together"]):
        changed = answer([WORK, *change["flags"].split()], capsys)
        assert changed["step_s"] == change["step_s"] < found["step_s"]
        assert changed["memory_bytes"] == change["memory_bytes"]


def test_what_does_not_fit_ends_with_one_and_says_what_would(capsys: Captured) -> None:
    found = answer([*LLAMA_405B, *SPLIT, "--sequence-length", "8192"], capsys, code=1)
    assert not found["fits"]
    assert found["changes"][0]["memory_bytes"] < found["memory_bytes"]


def test_a_model_may_be_named_where_a_file_could_stand(capsys: Captured) -> None:
    rest = ["--cluster", "dgx-h100", "--gpus", "8", "--tp", "2", "--zero", "1"]
    by_word = answer(["llama3.1-8b", *rest], capsys)
    assert by_word == answer(["--model", "llama3.1-8b", *rest], capsys)


def test_a_models_own_file_or_folder_will_do(tmp_path: Path, capsys: Captured) -> None:
    main(["models", "qwen3-0.6b", "--as", "toml"])
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    from_file = answer([str(tmp_path / "mine.toml"), "--cluster", "dgx-h100"], capsys)
    assert from_file == answer(["qwen3-0.6b", "--cluster", "dgx-h100"], capsys)


def test_a_model_beside_a_file_takes_its_models_place(capsys: Captured) -> None:
    small = answer([WORK, "llama3.1-8b", "--virtual-stages", "4"], capsys)
    assert small["step_s"] < answer([WORK], capsys)["step_s"]


def test_two_models_are_one_too_many(capsys: Captured) -> None:
    said = faults(["llama3.1-8b", "--model", "llama3.1-70b", "--cluster", "dgx-h100"], capsys)
    assert "llama3.1-8b, llama3.1-70b" in said


def test_a_model_that_is_nearly_right_is_suggested(capsys: Captured) -> None:
    said = faults(["llama-3-405b", "--cluster", "dgx-h100"], capsys)
    assert "llama3-405b" in said


def test_layers_that_do_not_divide_get_the_flag_that_divides_them(capsys: Captured) -> None:
    said = faults(LLAMA_405B, capsys)
    assert "126 layers do not split evenly into 16 chunks" in said
    assert f"--stage-layers 7,{'8,' * 14}7" in said
    assert "--pp 14" in said


def test_every_violation_of_a_layout_is_listed(capsys: Captured) -> None:
    words = ["llama3.1-8b", "--cluster", "dgx-h100", "--gpus", "32", "--tp", "3", "--pp", "5"]
    said = faults([*words, "--precision", "nvfp4", "--ep", "2"], capsys)
    for fault in (
        "--gpus: 32 is not a multiple of tp × cp × pp = 15",
        "--tp: 3 does not divide the 32 attention heads",
        "32 layers do not split evenly into 5 chunks",
        "--precision: a h100-80g-sxm has no nvfp4",
    ):
        assert fault in said


def test_a_clusters_faults_are_listed_with_the_layouts(tmp_path: Path, capsys: Captured) -> None:
    cluster = tmp_path / "mine.toml"
    cluster.write_text(
        'name = "mine"\ntitle = "Mine"\ngpu = "h1000"\nnodes = 4\n'
        'scale_up = { kind = "nvlink", gpus = 8, gpu_bytes_per_s = nan, latency_s = "1us" }\n'
        'host = { gpu_bytes_per_s = "63GB/s", latency_s = "1us" }\n'
        'nics = { per_node = 8, nic_bytes_per_s = nan, latency_s = "2us" }\n'
        'fabric = { kind = "infiniband", tiers = [{ name = "leaf" }] }\n'
    )
    said = faults(["llama3.1-8b", "--cluster", str(cluster), "--tp", "3"], capsys)
    for fault in (
        "gpu: there is no GPU named 'h1000'",
        "scale_up.gpu_bytes_per_s: nan is not a finite number",
        "nics.nic_bytes_per_s: nan is not a finite number",
        "--tp: 3 does not divide the 32 attention heads",
    ):
        assert fault in said
    assert "h100" in said


@pytest.mark.parametrize("pattern", ["0*dense", ""])
def test_a_model_of_no_layers_is_refused(pattern: str, tmp_path: Path, capsys: Captured) -> None:
    main(["models", "qwen3-0.6b", "--as", "toml"])
    text = re.sub(r'pattern = ".*"', f'pattern = "{pattern}"', capsys.readouterr().out)
    (tmp_path / "none.toml").write_text(text)
    said = faults([str(tmp_path / "none.toml"), "--cluster", "dgx-h100"], capsys)
    assert "none.toml: pattern: names no layer" in said


def test_a_config_of_no_layers_is_refused(tmp_path: Path, capsys: Captured) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 0, "hidden_size": 64, "vocab_size": 99,
        "num_attention_heads": 8, "intermediate_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers: 0" in faults([str(tmp_path), "--cluster", "dgx-h100"], capsys)


def test_a_straggler_makes_the_executed_step_longer(capsys: Captured) -> None:
    even, slow = answer([WORK], capsys), answer([WORK, "--straggler", "2=1.5"], capsys)
    assert even["simulated_step_s"] == even["undisturbed_step_s"]
    assert slow["undisturbed_step_s"] == even["simulated_step_s"]
    assert slow["simulated_step_s"] > 1.3 * even["simulated_step_s"]
    assert slow["step_s"] == even["step_s"]


def test_jitter_follows_its_seed(capsys: Captured) -> None:
    words = [WORK, "--jitter", "0.1"]
    one, same = answer(words, capsys), answer([*words, "--seed", "0"], capsys)
    other = answer([*words, "--seed", "1"], capsys)
    assert one["simulated_step_s"] == same["simulated_step_s"] != other["simulated_step_s"]


def test_a_job_waits_for_its_slowest_replica(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [WORK, "--slow-gpus", "0.02=1.5"]
    found = answer(words, capsys)
    assert found["replicas_step_s"] > 1.3 * found["undisturbed_step_s"]
    assert answer([WORK, "--straggler", "2=1.5"], capsys)["replicas_step_s"] is None
    (line,) = [one for one in screen(words, capsys, monkeypatch) if one.startswith("executed")]
    assert "slowest of 32 uneven replicas" in line


def test_a_busy_expert_rank_makes_the_executed_step_longer(capsys: Captured) -> None:
    even, busy = answer(EVERY_PART, capsys), answer([*EVERY_PART, "--expert-load", "2"], capsys)
    assert busy["simulated_step_s"] > even["simulated_step_s"]


def test_the_interval_holds_the_step(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer([WORK], capsys)
    assert found["low_s"] < found["step_s"] < found["high_s"]
    assert any(line.startswith("interval ") for line in screen([WORK], capsys, monkeypatch))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--straggler", "9=1.2"], "--straggler: 9 is not a pipeline rank"),
        (["--straggler", "fast"], "--straggler: 'fast' is not a rank and a factor"),
        (["--straggler", "1=x"], "--straggler: '1=x' is not a rank and a factor"),
        (["--jitter", "-1"], "--jitter: -1.0"),
        (["--jitter", "much", "--seed", "x"], "--seed: 'x'"),
        (["--slow-gpus", "0.1"], "--slow-gpus: '0.1' is not a share and a factor"),
        (["--slow-gpus", "2=1.2"], "--slow-gpus: 2.0 is not a share of the GPUs"),
        (["--slow-gpus", "0.1=0.5", "--jitter", "x"], "--slow-gpus: 0.5"),
        (["--expert-load", "1.5"], "--expert-load: experts are not spread"),
        (["--expert-load", "nan"], "--expert-load: 'nan'"),
    ],
)
def test_a_disturbance_that_cannot_be_is_named(
    words: list[str], fault: str, capsys: Captured
) -> None:
    assert fault in faults([WORK, *words], capsys)


def test_tokens_on_the_command_line_show_the_whole_run(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer([WORK, "--tokens", "2T"], capsys)["long_run"]
    assert 0 < found["goodput"] <= 1
    assert "training on 2T tokens" in screen([WORK, "--tokens", "2T"], capsys, monkeypatch)
    assert answer(["qwen3-0.6b", "--cluster", "dgx-h100"], capsys)["long_run"] is None


@pytest.mark.parametrize("name", ["step.json", "step.json.gz", "step.perfetto"])
def test_the_executed_step_is_written_for_perfetto(
    name: str, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / name
    assert main(["simulate", WORK, "--timeline", str(out)]) == 0
    data = out.read_bytes()
    assert json.loads(data if name.endswith(".json") else gzip.decompress(data))
    assert list(tmp_path.iterdir()) == [out]
    assert str(out) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file/step.perfetto", "file/step.json", "step.txt"])
def test_a_timeline_that_cannot_be_written_is_named(
    name: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path) in faults([WORK, "--timeline", str(tmp_path / name)], capsys)
