"""`mw calibrate`: rows become constants that predictions then use."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.cli import main
from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.suite import encode_rows
from meshwright.predict.cost import load_calibration
from tests.observe.calibrate.synthetic import GPU, MACHINE, measured, product_cases

Captured = pytest.CaptureFixture[str]

STEP = ["simulate", "llama3.1-8b", "--cluster", "h200-superpod", "--gpus", "8", "--zero", "1"]


def write_rows(path: Path, rows: tuple[BenchRow, ...]) -> str:
    path.write_bytes(encode_rows(MACHINE, rows))
    return str(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CALIBRATIONS", str(tmp_path / "mine"))
    return tmp_path / "mine"


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path / "rows.jsonl", measured(product_cases(30), noise=0.01))


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main([*words, "--json"]) == code
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_it_writes_where_predictions_look(rows: str, home: Path, capsys: Captured) -> None:
    before = answer(STEP, capsys)
    assert before["calibration"]["path"] is None
    made = answer(["calibrate", rows], capsys)
    assert made["path"] == str(home / f"{GPU.name}.toml")
    after = answer(STEP, capsys)
    assert after["calibration"]["path"] == made["path"]
    assert after["step_s"] > before["step_s"]  # the made-up device is slow
    switched_off = answer([*STEP, "--no-calibration"], capsys)
    assert switched_off["step_s"] == before["step_s"]


def test_every_screen_says_which_constants_it_used(rows: str, home: Path, capsys: Captured) -> None:
    # Nothing of a screen is coloured or folded in a pipe.
    work = STEP[1:]
    asked = [["simulate", *work], ["whatif", *work, "microbatch=x2"]]
    asked.append(["plan", *work[:5], "--quick", "--fix", "tp=1", "--fix", "pp=1"])
    for words in asked:
        main(words)
        assert "built-in constants, measured" in capsys.readouterr().out
    main(["calibrate", rows])
    capsys.readouterr()
    for words in asked:
        main(words)
        assert f"calibrated, {GPU.name}.toml: mw bench on NVIDIA H200" in capsys.readouterr().out


def test_a_file_is_used_where_it_is_asked_for(
    rows: str, tmp_path: Path, home: Path, capsys: Captured
) -> None:
    path = str(tmp_path / "other.toml")
    answer(["calibrate", rows, "-o", path], capsys)
    assert not home.exists()
    assert load_calibration(path).software == "meshwright"
    assert answer([*STEP, "--calibration", path], capsys)["calibration"]["path"] == path


def test_errors_are_reported_for_each_part(rows: str, home: Path, capsys: Captured) -> None:
    (family,) = answer(["calibrate", rows], capsys)["families"]
    assert family["family"] == "gemm bf16"
    assert family["cross_validated"]["num_rows"] == 30
    assert set(family["cross_validated_by_part"]) == {
        "forward",
        "input_gradient",
        "weight_gradient",
    }
    assert family["validation"] is None


def test_held_out_rows_are_scored_and_never_fitted(
    rows: str, tmp_path: Path, home: Path, capsys: Captured
) -> None:
    others = measured(product_cases(9, after=30))
    path = write_rows(tmp_path / "others.jsonl", others)
    plain = answer(["calibrate", rows], capsys)
    scored = answer(["calibrate", rows, "--validation-rows", path], capsys)
    assert scored["families"][0]["validation"]["num_rows"] == 9
    ours, theirs = (made["calibration"]["products"][0] for made in (plain, scored))
    assert ours["efficiency"] == theirs["efficiency"]


def test_a_dry_run_writes_nothing(rows: str, home: Path, capsys: Captured) -> None:
    assert answer(["calibrate", rows, "--dry-run"], capsys)["path"] is None
    assert not home.exists()


def test_what_stays_default_is_said(rows: str, home: Path, capsys: Captured) -> None:
    main(["calibrate", rows])
    printed = capsys.readouterr()
    assert "stays default" in printed.out
    assert "attention backward" in printed.out
    assert "of the peak inside full tiles" in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate", "absent.jsonl"], "no such file"),
        ([*STEP, "--calibration", "absent.toml"], "no such file"),
        ([*STEP, "--calibration", "x.toml", "--no-calibration"], "--no-calibration"),
    ],
)
def test_a_mistake_is_named(words: list[str], said: str, capsys: Captured) -> None:
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "hint:" in printed


def test_a_calibration_of_another_device_is_refused(
    rows: str, tmp_path: Path, capsys: Captured
) -> None:
    path = str(tmp_path / "h200.toml")
    answer(["calibrate", rows, "-o", path], capsys)
    words = ["simulate", "llama3.1-8b", "--cluster", "h100-superpod", "--gpus", "8"]
    assert main([*words, "--calibration", path]) == 2
    assert "is of h200-141g-sxm, and the work runs on h100" in capsys.readouterr().err


def test_held_out_rows_of_another_device_are_refused(
    rows: str, tmp_path: Path, capsys: Captured
) -> None:
    other = tmp_path / "other.jsonl"
    machine = msgspec.structs.replace(MACHINE, device="NVIDIA L4")
    other.write_bytes(encode_rows(machine, ()))
    assert main(["calibrate", rows, "--validation-rows", str(other)]) == 2
    assert "measure both on one device" in capsys.readouterr().err


def test_the_software_that_was_measured_is_predicted_without_allowances(
    rows: str, home: Path, capsys: Captured
) -> None:
    assert main(["calibrate", rows]) == 0
    capsys.readouterr()
    steps = {
        name: answer([*STEP, "--framework", name], capsys)["step_s"]
        for name in ("megatron", "eager", "meshwright")
    }
    assert len(set(steps.values())) == 3
    assert steps["eager"] > steps["megatron"]
    assert main([*STEP, "--framework", "megatron"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "software: megatron (the kernels measured are those of meshwright)" in shown
    assert main([*STEP, "--framework", "other"]) == 2
