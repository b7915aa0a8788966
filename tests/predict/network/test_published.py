"""Predictions against published measurements: the errors that the docs state."""

import json
from pathlib import Path
from typing import get_args

import pytest

from meshwright.errors import DamagedFile
from meshwright.predict.network.fabric import corrections
from meshwright.spec.cluster.parts import FabricKind
from validation.collectives import page
from validation.collectives.fit import cross_validation
from validation.collectives.rows import COLUMNS, RUNS, Row, packed, read_rows
from validation.collectives.score import Scored, grouped, main, score
from validation.collectives.systems import Unreadable, system

ROWS = read_rows(RUNS)


@pytest.fixture(scope="module")
def scored() -> list[Scored]:
    return score(ROWS)


def test_every_row_has_an_answer(scored: list[Scored]) -> None:
    assert [item.row for item in scored] == list(range(len(ROWS)))
    assert all((item.error is None) == (item.skipped is not None) for item in scored)


def test_errors_stay_within_the_targets(scored: list[Scored]) -> None:
    group = grouped([item for item in scored if item.error is not None])
    assert group.large_median is not None
    assert group.small_median is not None
    assert group.large_median <= 0.12
    assert group.small_median <= 0.25


def test_systems_never_seen_stay_within_the_targets() -> None:
    group = grouped(cross_validation(ROWS, corrections())["held-out half"])
    assert group.large_median is not None
    assert group.small_median is not None
    assert group.large_median <= 0.12
    assert group.small_median <= 0.25


def test_page_states_the_constants_and_errors_of_the_code() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.constants() in text, "run python -m validation.collectives.page"
    assert page.errors() in text, "run python -m validation.collectives.page"


@pytest.mark.slow
def test_page_is_up_to_date() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.renewed(text) == text, "run python -m validation.collectives.page"


def test_no_kind_of_link_is_without_constants() -> None:
    kinds = set(get_args(FabricKind)) - {"none"}
    assert kinds <= set(corrections())


def row(**changes: object) -> Row:
    plain: Row = {
        "system": "a cluster",
        "gpu": "H100 80GB HBM3",
        "nodes": 2,
        "gpus": 16,
        "gpus_per_node": 8,
        "intra": "NVLink4 (H100/H200 NVSwitch)",
        "inter": "8x400Gb/s NDR IB",
        "collective": "all_reduce",
        "size_bytes": 1 << 30,
        "time_us": 4500.0,
        "busbw_GBps": None,
        "nccl_version": None,
        "algo": None,
    }
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("inter", "cards", "gbit", "kind"),
    [
        ("8x400Gb/s NDR IB", 8, 400, "infiniband"),
        ("32x100Gb/s EFA (3200Gb/s)", 32, 100, "efa"),
        ("8x2x400Gb/s RoCE (6.4Tb/s)", 16, 400, "roce"),
        ("8x dual-port 200Gb/s CX-7 RoCE", 16, 200, "roce"),
        ("1.6Tb/s TCPXO", 8, 200, "ethernet"),
        ("2x200Gb/s Slingshot", 2, 200, "slingshot"),
        ("not stated (implies 1x400Gb/s per GPU)", 8, 400, "infiniband"),
    ],
)
def test_network_is_read_from_a_rows_words(inter: str, cards: int, gbit: float, kind: str) -> None:
    found = system(row(inter=inter))
    assert found.cluster.nics is not None
    assert found.cluster.nics.per_node == cards
    assert found.cluster.nics.nic_bytes_per_s == pytest.approx(gbit * 1e9 / 8)
    assert found.cluster.fabric.kind == kind
    assert found.assumed == ()


def test_speed_that_is_not_stated_is_said_to_be_assumed() -> None:
    assert system(row(inter="InfiniBand (not stated)")).assumed == ("400 Gb/s per GPU",)


def test_bus_bandwidth_stands_in_for_a_time() -> None:
    timed, untimed = row(), row(time_us=None, busbw_GBps=(1 << 30) * 1.875 / 4500e3)
    first, second = score([timed, untimed])
    assert second.error == pytest.approx(first.error)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": None}, "GPU"),
        ({"gpu": "TPU v9"}, "catalog"),
        ({"gpus": None}, "how many"),
        ({"size_bytes": None}, "size"),
        ({"collective": "ep_dispatch"}, "not a collective"),
        ({"time_us": None}, "neither"),
    ],
)
def test_row_that_cannot_be_scored_says_why(changes: dict[str, object], reason: str) -> None:
    (answer,) = score([row(**changes)])
    assert answer.error is None
    assert reason in (answer.skipped or "")


def test_row_without_a_gpu_has_no_system() -> None:
    with pytest.raises(Unreadable):
        system(row(gpu=None))


def test_packed_rows_unpack_to_themselves(tmp_path: Path) -> None:
    rows = [
        row(source="https://example.org/a#L1"),
        row(source="https://example.org/a#L2", time_us=9),
    ]
    path = tmp_path / "runs.json"
    path.write_text(packed(rows), encoding="utf-8")
    again = read_rows(path)
    assert [[r[name] for name in COLUMNS] for r in again] == [
        [r[name] for name in COLUMNS] for r in rows
    ]
    assert len(json.loads(path.read_text(encoding="utf-8"))["sweeps"]) == 1


@pytest.mark.parametrize("text", ["{", '{"rows": 1}', "[1, 2]"])
def test_file_that_holds_no_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DamagedFile):
        read_rows(path)


def test_command_prints_rows_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rows"]) == len(ROWS)
    assert {"predicted_us", "measured_us", "error", "skipped"} <= set(answer["rows"][0])
    assert "all" in answer["summary"]
