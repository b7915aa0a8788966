"""`mw fleet patterns`: one screen, JSON, reports, pseudonyms."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.fleet.store import FleetStore, RetentionPolicy
from tests.fleet.patterns.small_fleet import GIB, held, job, rows, samples


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fleet") / "store"
    one = job(hours=6, gpus=1, user="../ada", name="secret-plan")
    with FleetStore(str(folder), create=True) as kept:
        kept.put("jobs", rows("jobs", one))
        kept.put("allocations", rows("allocations", *held(one, 0)))
        kept.put(
            "gpu_samples", samples(6, gpu_util=0.0, memory_used=50 * GIB, memory_total=80 * GIB)
        )
    return str(folder)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["fleet", "patterns", *words]) == 0
    return capsys.readouterr().out


def test_the_screen_ranks_what_is_found(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "--store", store, "--price", "2")
    assert "idle-allocation" in said
    assert "../ada" in said
    assert "12" in said


def test_json_holds_evidence_remedy_and_cost(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(answer(capsys, "--store", store, "--json"))
    (only,) = data["findings"]
    assert only["name"] == "idle-allocation"
    assert only["gpu_hours"] == pytest.approx(6, abs=0.2)
    assert only["evidence"]
    assert only["remedy"]
    assert data["allocated_gpu_hours"] == pytest.approx(6)


def test_one_pattern_is_told_with_what_to_change(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--dependency=afterok" in answer(
        capsys, "--store", store, "--pattern", "idle-allocation"
    )


def test_redacted_answers_and_reports_name_nobody(
    store: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = answer(capsys, "--store", store, "--redact", "--messages", str(tmp_path / "out"))
    texts = [path.read_text() for path in (tmp_path / "out").iterdir()]
    assert texts
    for text in (said, *texts):
        assert "ada" not in text
        assert "secret-plan" not in text


def test_a_users_name_leads_out_of_no_folder(
    store: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer(capsys, "--store", store, "--messages", str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_ada.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_pattern_that_is_not_there_is_named(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "patterns", "--store", store, "--pattern", "idle-alocation"]) == 2
    assert "did you mean idle-allocation?" in capsys.readouterr().err


def test_hours_do_where_windows_have_been_let_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = job(hours=6)
    with FleetStore(str(tmp_path / "store"), create=True) as kept:
        kept.put("jobs", rows("jobs", one))
        kept.put("allocations", rows("allocations", *held(one, 0)))
        kept.put(
            "gpu_samples", samples(6, gpu_util=0.0, memory_used=50 * GIB, memory_total=80 * GIB)
        )
        kept.apply_retention(
            RetentionPolicy(samples=1, rollups_5m=2), now_s=one["end_s"] + 30 * 86400
        )
        assert not kept.table_sizes()["gpu_rollups_5m"].num_rows
        assert kept.table_sizes()["gpu_rollups_1h"].num_rows
    data = json.loads(answer(capsys, "--store", str(tmp_path / "store"), "--json"))
    assert [found["name"] for found in data["findings"]] == ["idle-allocation"]
    assert data["findings"][0]["gpu_hours"] == pytest.approx(6, abs=2)
