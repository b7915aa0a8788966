"""`mw analyze` of what has no times: logs of NCCL's and execution traces."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.observe.analyze.nccl_log.test_nccl_report import ALL, SOUND, made, way
from tests.timeline.readers.execution_trace.test_execution_trace_reader import NEW
from tests.timeline.readers.small_chakra import COMPUTE, REDUCE, trace

Captured = pytest.CaptureFixture[str]


def test_a_log_is_told_on_one_screen(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "job.log"
    path.write_text("\n".join([*SOUND, way(0, 1, "SHM/direct")]))
    assert main(["analyze", str(path)]) == 0
    printed = capsys.readouterr().out
    for text in ("2.27.3+cuda12.9", "mlx5_0:1/IB", "0xdead", "NET/IB", "nvidia-smi topo -p2p r"):
        assert text in printed
    assert len(printed.splitlines()) < 40


def test_several_logs_and_their_folder_say_the_same(tmp_path: Path, capsys: Captured) -> None:
    for rank in range(4):
        (tmp_path / f"{rank}.log").write_text("\n".join(made(rank)))
    main(["analyze", *(str(tmp_path / f"{rank}.log") for rank in range(4)), "--json"])
    several = json.loads(capsys.readouterr().out)
    main(["analyze", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out) == several
    assert several["schema"] == "meshwright.analyze.nccl/2"
    assert several["communicators"][0]["ranks_seen"] == [0, 1, 2, 3]


def test_a_log_tells_the_nics_that_nccl_found(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "job.log").write_text("\n".join(SOUND))
    main(["analyze", str(tmp_path / "job.log"), "--json"])
    assert json.loads(capsys.readouterr().out)["nics"] == ["mlx5_0:1/IB", "mlx5_1:1/IB"]


def test_findings_of_a_log_have_a_family_and_say_that_they_cost_no_time(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "job.log").write_text("\n".join([*ALL, way(0, 1, "SHM/direct")]))
    main(["analyze", str(tmp_path / "job.log"), "--json"])
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["family"] == "nccl"
    assert finding["cost_basis"].startswith("not in time")


def test_quiet_prints_the_names_of_findings(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "job.log").write_text("\n".join([*ALL, way(0, 1, "SHM/direct")]))
    main(["analyze", str(tmp_path / "job.log"), "-q"])
    assert capsys.readouterr().out.split() == ["peers-through-host"]


def test_a_log_in_which_nccl_begins_late_is_found(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "slurm.out").write_text("loading\n" * 20_000 + "\n".join(ALL))
    assert main(["analyze", str(tmp_path / "slurm.out")]) == 0
    assert "0xdead" in capsys.readouterr().out


def test_an_execution_trace_says_plainly_that_it_has_no_times(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "et.json").write_text(json.dumps(NEW))
    assert main(["analyze", str(tmp_path / "et.json")]) == 0
    printed = capsys.readouterr().out
    assert "not when" in printed
    assert "all_reduce\t0\t2\tfp32\t1\t4,096" in printed
    main(["analyze", str(tmp_path / "et.json"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["has_times"]) == ("meshwright.analyze.operators/2", False)
    assert {"gemms", "uncounted_gemms", "assumptions"} <= set(answer)


def test_a_trace_of_chakras_with_times_is_a_timeline(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "job.3.et").write_bytes(trace([COMPUTE, REDUCE]))
    assert main(["analyze", str(tmp_path / "job.3.et"), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (rank["rank"], rank["compute_ms"]) == (3, 0.025)


def test_flags_of_timelines_are_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "job.log").write_text("\n".join(ALL))
    assert main(["analyze", str(tmp_path / "job.log"), "--html", "x.html"]) == 2
    assert "leave out --html" in capsys.readouterr().err


def test_logs_and_traces_together_are_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "job.log").write_text("\n".join(ALL))
    (tmp_path / "et.json").write_text(json.dumps(NEW))
    assert main(["analyze", str(tmp_path / "job.log"), str(tmp_path / "et.json")]) == 2
    assert "give one trace" in capsys.readouterr().err
