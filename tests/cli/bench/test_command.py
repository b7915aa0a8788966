"""`mw bench` measures, shows, judges, and goes on where it was stopped."""

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.cli import main
from meshwright.cli.bench.command import _of_ranks
from meshwright.observe.bench import burn_in, timing
from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.io import storage
from meshwright.observe.bench.suite import encode_rows, read_bench
from meshwright.observe.calibrate.expected_times import predict_expected_times
from meshwright.observe.hardware.machine import Machine
from meshwright.run.parallel.launch.world import World
from meshwright.spec.catalog import get_gpu

torch = pytest.importorskip("torch", reason="the bench measures with torch")

Captured = pytest.CaptureFixture[str]
MACHINE = Machine(device="NVIDIA H200", gpu="h200-141g-sxm", torch="2.13.0", driver="580")


def sound_rows() -> list[BenchRow]:
    """Rows of an H200 as the catalog expects them."""
    cases = [
        BenchCase(family="memory_copies", name="copy", sizes={"bytes": size})
        for size in (1 << 28, 1 << 30)
    ]
    rows = [
        BenchRow(
            case=case, median_s=1, p10_s=1, p90_s=1, num_samples=7, bytes=2.0 * case.size("bytes")
        )
        for case in cases
    ]
    expected = predict_expected_times(rows, get_gpu("h200")).seconds
    return [replace(row, median_s=expected[row.case.key]) for row in rows]


def kept(path: Path, rows: list[BenchRow], machine: Machine = MACHINE) -> str:
    path.write_bytes(encode_rows(machine, rows))
    return str(path)


def answer(words: list[str], capsys: Captured, code: int = 0) -> dict[str, Any]:
    assert main([*words, "--json"]) == code
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def error(words: list[str], capsys: Captured, code: int = 2) -> str:
    assert main(words) == code
    return capsys.readouterr().err


def test_rows_that_were_kept_are_shown_against_the_peak(tmp_path: Path, capsys: Captured) -> None:
    path = kept(tmp_path / "rows.jsonl", sound_rows())
    assert main(["bench", "--show", path]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200 (h200-141g-sxm)" in out
    assert "85%" in out  # what copies of an H200 reach of its bandwidth
    assert answer(["bench", "--show", path, "--families", "storage"], capsys)["rows"] == []


def test_a_sound_device_is_told_from_a_slow_one(tmp_path: Path, capsys: Captured) -> None:
    rows = sound_rows()
    sound = kept(tmp_path / "sound.jsonl", rows)
    assert answer(["bench", "--show", sound, "--health-check"], capsys)["health"]["passed"]
    slow = kept(
        tmp_path / "slow.jsonl", [replace(one, median_s=one.median_s / 0.82) for one in rows]
    )
    told = answer(["bench", "--show", slow, "--health-check"], capsys, code=1)["health"]
    assert not told["passed"]
    assert main(["bench", "--show", slow, "--health-check"]) == 1
    assert "memory 18 % below NVIDIA H200" in capsys.readouterr().err


def test_other_devices_rows_serve_where_the_catalog_has_none(
    tmp_path: Path, capsys: Captured
) -> None:
    unknown, rows = Machine(device="some processor"), sound_rows()
    one = kept(tmp_path / "one.jsonl", rows, unknown)
    slow = [replace(row, median_s=1.5 * row.median_s) for row in rows]
    other = kept(tmp_path / "other.jsonl", slow, unknown)
    assert "--baseline" in error(["bench", "--show", one, "--health-check"], capsys)
    words = ["bench", "--health-check", "--baseline", one, "--show"]
    assert answer([*words, one], capsys)["health"]["passed"]
    assert not answer([*words, other], capsys, code=1)["health"]["passed"]


def test_a_bench_keeps_rows_and_goes_on_with_them(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "rows.jsonl", tmp_path / "log.txt"
    monkeypatch.setattr(storage, "FILE_BYTES", {"quick": 1 << 20})
    monkeypatch.setattr(timing, "BUDGET_S", 0.01)
    words = ["bench", "--quick", "--families", "storage", "--device", "cpu", "-o", str(path)]
    words += ["--folder", str(tmp_path)]
    first = answer([*words, "--mlperf-log", str(log)], capsys)
    assert first["rows"]
    assert first["failed_cases"] == []
    assert log.read_text().count(":::MLLOG") == len(first["rows"]) + 5
    assert "--resume" in error(words, capsys)
    before = path.read_bytes()
    again = answer([*words, "--resume"], capsys)
    assert path.read_bytes() == before
    assert len(again["rows"]) == len(first["rows"])


def test_a_burn_in_says_what_it_found(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in, "GEMM_SIZE", {"cpu": 48})
    told = answer(["bench", "--burn-in", "0.0005", "--device", "cpu"], capsys)
    assert told["passed"]
    assert told["intervals"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--families", "storag"], "storage"),
        (["--resume"], "-o FILE"),
        (["--show", "nothing.jsonl"], "no such file"),
        (["--folder", "nowhere/at/all", "--families", "storage"], "no such folder"),
        (["--baseline", "nothing.jsonl", "--health-check"], "no such file"),
        (["--nproc-per-node", "0"], "--nproc-per-node"),
        (["--time-limit", "0"], "--time-limit"),
        (["--burn-in", "-1"], "--burn-in"),
        (["--device", "tpu"], "--device"),
        (["--device", "cpu", "--health-check"], "--baseline"),
        (["--quick", "--full"], "not allowed with"),
    ],
)
def test_mistakes_are_named_with_their_fix(words: list[str], said: str, capsys: Captured) -> None:
    told = error(["bench", *words], capsys)
    assert said in told
    assert "hint:" in told


def test_a_gpu_that_is_not_there_is_missing(capsys: Captured) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "torch sees 0 GPUs" in error(["bench", "--device", "cuda"], capsys, code=3)


def test_without_torch_it_says_what_is_missing(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    told = error(["bench", "--quick"], capsys, code=3)
    assert "torch" in told
    assert "meshwright[train]" in told
    assert main(["bench", "--show", kept(tmp_path / "rows.jsonl", sound_rows())]) == 0


def test_ranks_of_a_launcher_are_refused_what_one_alone_does() -> None:
    asked = Namespace(nproc_per_node="2", burn_in="1")
    found = _of_ranks(asked, World(size=2), frozenset({"gemm", "p2p"}))
    assert [problem.where for problem in found] == ["--nproc-per-node", "--burn-in", "--families"]
    assert all(problem.fix for problem in found)
    assert _of_ranks(asked, World(), frozenset({"gemm"})) == []


@pytest.mark.slow
def test_ranks_of_a_launcher_measure_together_and_one_of_them_speaks(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    port = str(free_port())
    words = ["bench", "--quick", "--families", "p2p", "--device", "cpu", "-o", str(out), "-q"]

    def start(rank: int) -> subprocess.Popen[str]:
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, "-m", "meshwright", *words]
        environment = {**os.environ, **place}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    ranks = [start(0), start(1)]
    said = [each.communicate(timeout=120)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0]
    assert "one way, 2 ranks, gloo" in said[0]
    assert said[1] == ""
    assert len(read_bench(out).rows) == 6


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
