"""`mw layout`: what is asked in files, variables and flags, and what is answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]

WORK = """
model = "llama3.1-8b"
cluster = "h100-superpod"
gpus = 64
[layout]
tp = 2
sequence_parallel = true
zero = 1
"""


@pytest.fixture
def work(tmp_path: Path) -> str:
    path = tmp_path / "work.toml"
    path.write_text(WORK)
    return str(path)


def sources(words: list[str], capsys: Captured) -> dict[str, tuple[Any, str]]:
    assert main(["layout", "check", *words, "--dry-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["values"]
    return {row["field"]: (row["value"], row["source"]) for row in rows}


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main(["layout", *words, "--json"]) == code
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_flags_beat_the_environment_which_beats_files(
    work: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "more.toml"
    overlay.write_text("[layout]\npp = 2\nmicrobatch = 2\n")
    monkeypatch.setenv("MESHWRIGHT_LAYOUT_MICROBATCH", "4")
    monkeypatch.setenv("MESHWRIGHT_LAYOUT_ZERO", "2")
    found = sources([work, str(overlay), "--zero", "3"], capsys)
    assert found["layout.tp"] == (2, work)
    assert found["layout.pp"] == (2, str(overlay))
    assert found["layout.microbatch"] == (4, "environment")
    assert found["layout.zero"] == (3, "flag")
    assert found["layout.cp"] == (1, "default")


def test_gpus_fill_in_data_parallel(work: str, capsys: Captured) -> None:
    assert sources([work], capsys)["layout.dp"][0] == 32
    value, source = sources([work, "--gpus", "128"], capsys)["layout.dp"]
    assert value == 64
    assert source == "from gpus (flag)"


def test_a_batch_on_the_command_line_has_the_last_word(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "batch.toml"
    path.write_text(WORK + "global_batch = 64\n[workload]\nglobal_batch = 64\n")
    found = sources([str(path), "--global-batch", "128"], capsys)
    assert found["layout.global_batch"] == (128, "flag")
    assert found["workload.global_batch"] == (128, "flag")


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("MESHWRIGHT_LAYOUT_TPP", "8", "MESHWRIGHT_LAYOUT_TP"),
        ("MESHWRIGHT_LAYOUT_SEQUENCE_PARALLEL", "maybe", "use true"),
        ("MESHWRIGHT_LAYOUT_TP", "x", "MESHWRIGHT_LAYOUT_TP"),
    ],
)
def test_a_bad_variable_is_named(
    work: str, name: str, value: str, hint: str, capsys: Captured
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        assert main(["layout", "check", work]) == 2
    printed = capsys.readouterr().err
    assert name in printed
    assert hint in printed


def test_a_bad_value_names_the_file_it_stands_in(
    work: str, tmp_path: Path, capsys: Captured
) -> None:
    overlay = tmp_path / "more.toml"
    overlay.write_text("[layout]\nzero = 9\n[workload]\nsequence_length = -1\n")
    assert main(["layout", "check", work, str(overlay)]) == 2
    printed = capsys.readouterr().err
    assert f"{overlay}: layout.zero" in printed
    assert f"{overlay}: workload.sequence_length" in printed


def test_paths_in_a_file_count_from_its_folder(work: str, tmp_path: Path, capsys: Captured) -> None:
    main(["models", "qwen3-0.6b", "--as", "toml"])
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    Path(work).write_text(WORK.replace('"llama3.1-8b"', '"mine.toml"'))
    assert main(["layout", "check", work]) == 0


def test_switches_and_lists_come_from_the_environment(
    work: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_LAYOUT_SEQUENCE_PARALLEL", "no")
    monkeypatch.setenv("MESHWRIGHT_LAYOUT_OFFLOAD", "optimizer,activations")
    found = sources([work], capsys)
    assert found["layout.sequence_parallel"] == (False, "environment")
    assert found["layout.offload"] == (["optimizer", "activations"], "environment")


def test_a_sound_layout_is_ok(work: str, capsys: Captured) -> None:
    assert answer(["check", work], capsys)["ok"] is True


def test_a_violated_layout_is_answered_with_no(work: str, capsys: Captured) -> None:
    found = answer(["check", work, "--tp", "3", "--gpus", "24"], capsys, code=1)
    assert found["ok"] is False
    assert {"tp"} <= {problem["where"] for problem in found["problems"]}


def test_memory_says_no_when_it_does_not_fit(work: str, capsys: Captured) -> None:
    fits = answer(["memory", work, "--sequence-length", "8k"], capsys)
    assert fits["fits"] is True
    assert fits["sequence_length"] == 8000
    small = answer(
        ["memory", work, "--tp", "1", "--no-sequence-parallel", "--zero", "0"], capsys, 1
    )
    assert small["fits"] is False
    assert small["stages"][small["worst_stage"]]["total_bytes"] > small["capacity_bytes"]


def test_memory_refuses_what_cannot_be_laid_out(work: str, capsys: Captured) -> None:
    assert main(["layout", "memory", work, "--tp", "3", "--gpus", "24"]) == 2
    assert "does not divide" in capsys.readouterr().err


def test_what_is_exported_can_be_imported(work: str, tmp_path: Path, capsys: Captured) -> None:
    assert main(["layout", "export", work, "--to", "megatron"]) == 0
    flags = tmp_path / "flags.txt"
    flags.write_text(capsys.readouterr().out)
    found = answer(["import", str(flags), "--from", "megatron", "--gpus", "64"], capsys)
    assert found["layout"]["tp"] == 2
    assert found["layout"]["dp"] == 32
    assert found["layout"]["zero"] == 1


def test_an_imported_layout_is_a_work_file(work: str, tmp_path: Path, capsys: Captured) -> None:
    main(["layout", "export", work, "--to", "megatron"])
    flags = tmp_path / "flags.txt"
    flags.write_text(capsys.readouterr().out)
    main(["layout", "import", str(flags), "--from", "megatron", "--gpus", "64"])
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert main(["layout", "check", str(again), "--cluster", "h100-superpod"]) == 0


def test_every_fault_of_a_file_is_listed_at_once(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('model = "llama9"\ncluster = 3\ncolor = 1\n[layout]\ntpp = 2\nzero = "x"\n')
    assert main(["layout", "check", str(path)]) == 2
    printed = capsys.readouterr().err
    for word in ("llama9", "cluster", "color", "tpp", "zero"):
        assert word in printed


def test_the_fields_of_an_adapter_are_flags_of_their_own(work: str, capsys: Captured) -> None:
    words = [work, "--adapter-rank", "16", "--adapter-targets", "qkv,out"]
    value, source = sources(words, capsys)["workload.adapter"]
    assert (value, source) == ({"rank": 16, "targets": ["qkv", "out"]}, "flag")


def test_flags_and_variables_fill_in_an_adapter_that_a_file_begins(
    work: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "tune.toml"
    overlay.write_text("[workload]\nadapter = {rank = 16}\nexpert_imbalance = 1.5\n")
    monkeypatch.setenv("MESHWRIGHT_WORKLOAD_ADAPTER_RANK", "32")
    found = sources([work, str(overlay), "--adapter-targets", "up"], capsys)
    assert found["workload.adapter"] == ({"rank": 32, "targets": ["up"]}, "environment, flag")
    assert found["workload.expert_imbalance"] == (1.5, str(overlay))


def test_a_bad_field_of_an_adapter_is_named_by_its_flag(work: str, capsys: Captured) -> None:
    assert main(["layout", "memory", work, "--adapter-rank", "0"]) == 2
    assert "--adapter-rank" in capsys.readouterr().err


def test_an_adapter_needs_a_rank(work: str, capsys: Captured) -> None:
    assert main(["layout", "memory", work, "--adapter-targets", "up"]) == 2
    assert "workload.adapter.rank" in capsys.readouterr().err
