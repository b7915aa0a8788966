"""`mw fleet health`: one screen, one node, one Xid, JSON, and files for other programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main

pytest.importorskip("duckdb")

LOG = """\
2026-11-10T08:00:00+00:00 n1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid=7, name=python, GPU has fallen
2026-11-10T09:00:00+00:00 n2 kernel: NVRM: Xid (PCI:0000:9b:00): 31, pid=7, name=python, MMU Fault
2026-11-10T09:30:00+00:00 n3 kernel: NVRM: Xid (PCI:0000:9b:00): 94, pid=7, name=python, Contained
2026-11-10T10:00:00+00:00 n2 kernel: mlx5_core 0000:1a:00.0 ib0: Link up
2026-11-10T10:00:00+00:00 n2 kernel: NVRM: Xid (PCI:0000:9b:00): 43, pid=7, name=python, Ch 8
"""  # noqa: E501


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "kern.log").write_text(LOG)
    kept = str(folder / "store")
    words = ["fleet", "ingest", str(folder / "kern.log"), "--cluster", "east", "--store", kept]
    assert main([*words, "--quiet"]) == 0
    return kept


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["fleet", "health", *words]) == 0
    return capsys.readouterr().out


def test_the_screen_names_nodes_and_what_to_do(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answer(capsys, "--store", store)
    assert "1 drain, 1 watch, 1 ok" in said
    assert "n1" in said
    assert "Xid 79" in said
    assert "2 Xids that programs caused" in said
    assert answer(capsys, "--store", store) == said


def test_json_holds_reasons_and_what_clears_them(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data: dict[str, Any] = json.loads(answer(capsys, "--store", store, "--json"))
    first, second, third = data["nodes"]
    assert (first["node"], first["action"], first["faults"][0]["code"]) == ("n1", "drain", 79)
    assert "reboot" in first["cleared_by"]
    assert (second["node"], second["action"]) == ("n3", "watch")
    assert (third["node"], third["score"], third["faults"]) == ("n2", 100.0, [])
    assert data["application_xids"] == 2


def test_one_node_is_told_with_all_reasons(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "--store", store, "--node", "n1")
    assert "RESTART_BM" in said
    assert "a return to service" in said.replace("\n", " ")
    assert main(["fleet", "health", "--store", store, "--node", "n4"]) == 2


def test_one_xid_is_explained_without_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert "drain the node" in answer(capsys, "--xid", "79")
    said = answer(capsys, "--xid", "31", "--json")
    assert json.loads(said)["action"] == "none"


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hooks", "slurm", "--out", str(tmp_path / "hooks")]
    words += ["--rules", str(tmp_path / "a" / "rules.yml")]
    words += ["--dashboards", str(tmp_path / "boards")]
    files = answer(capsys, *words, "--quiet").splitlines()
    assert len(files) == 9
    assert all(Path(file).exists() for file in files)
    assert "DRAIN=no" in (tmp_path / "hooks" / "health.conf").read_text()
    answer(capsys, "--hooks", "slurm", "--out", str(tmp_path / "hooks"), "--drain")
    assert "DRAIN=yes" in (tmp_path / "hooks" / "health.conf").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--hooks", "slurm"],
        ["--out", "somewhere"],
        ["--drain"],
        ["--hooks", "kubernetes", "--out", "x", "--drain"],
        ["--xid", "many"],
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    assert main(["fleet", "health", *words]) == 2


@pytest.mark.parametrize("name", ['x="}', "a b", "$node", 'a"', "a\\"])
def test_what_is_no_label_is_not_written_into_dashboards(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fleet", "health", "--dashboards", str(tmp_path / "d"), "--node-label", name]
    assert main(words) == 2
    assert "--node-label" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
