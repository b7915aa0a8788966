"""Nodes judged: what drains, what clears, what fades, who is a lemon, who is unlike its peers."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from meshwright.fleet.health.assessment import FleetHealth, assess_fleet
from meshwright.fleet.health.score import NodeHealth
from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.store import FleetStore

pytest.importorskip("duckdb")

DAY = 86_400.0
NOW = 1_790_000_000.0 - 1_790_000_000.0 % DAY
SINCE = NOW - 30 * DAY


def event(node: str, days_ago: float, kind: str = "xid", code: int | None = None, *,
          text: str = "", gpu: int | None = 0) -> dict[str, Any]:  # fmt: skip
    return {"cluster": "east", "node": node, "gpu": gpu, "time_s": NOW - days_ago * DAY,
            "kind": kind, "code": code, "count": 1.0, "text": text}  # fmt: skip


def state(node: str, since: float, until: float | None, name: str) -> dict[str, Any]:
    """A stretch of time, in days ago."""
    return {"cluster": "east", "node": node, "since_s": NOW - since * DAY,
            "until_s": None if until is None else NOW - until * DAY, "state": name,
            "seen_s": NOW}  # fmt: skip


def device(node: str, since: float, uuid: str) -> dict[str, Any]:
    return {"cluster": "east", "node": node, "gpu": 0, "uuid": uuid,
            "since_s": NOW - since * DAY, "seen_s": NOW}  # fmt: skip


def rows(table: str, made: list[dict[str, Any]]) -> pa.Table:
    return make_rows(table, {name: [one[name] for one in made] for name in made[0]})


def judged(folder: Path, **tables: list[dict[str, Any]] | pa.Table) -> FleetHealth:
    with FleetStore(str(folder / "store"), create=True) as store:
        for name, made in tables.items():
            store.put(name, made if isinstance(made, pa.Table) else rows(name, made))
        first = assess_fleet(store, SINCE, NOW)
        assert assess_fleet(store, SINCE, NOW) == first
        return first


def only(health: FleetHealth, node: str = "n1") -> NodeHealth:
    (found,) = (one for one in health.nodes if one.node == node)
    return found


def test_faults_of_programs_leave_a_node_at_100(tmp_path: Path) -> None:
    codes = (13, 31, 43, 45)
    health = judged(tmp_path, events=[event("n1", 0.1 * i, code=codes[i % 4]) for i in range(40)])
    node = only(health)
    assert (node.score, node.action, node.reasons) == (100.0, "ok", ())
    assert health.num_application_xids == 40


def test_hardware_drains_and_says_why_and_what_clears_it(tmp_path: Path) -> None:
    told = [event("n1", 0.5, code=79), event("n1", 0.51, code=79), event("n2", 0.5, code=31)]
    health = judged(tmp_path, events=told)
    node = only(health)
    assert node.action == "drain"
    assert node.score == pytest.approx(100 * (1 - 0.9 * 2 ** (-0.5 / 7)))
    assert node.reasons == (
        "GPU 0: Xid 79: the GPU fell off the bus: the host cannot reach it, 12 h ago, 2 times",
    )
    assert "reboot" in node.action_text
    assert "RESTART_BM" in node.action_text
    assert "reboot" in node.cleared_by
    assert [one.node for one in health.nodes] == ["n1", "n2"]


CLEARS: list[tuple[int, dict[str, list[dict[str, Any]]], bool]] = [
    (79, {"events": [event("", 1, "boot", gpu=None)]}, True),
    (79, {"events": [event("", 3, "boot", gpu=None)]}, False),
    (79, {"events": [event("", 1, "checked", 0, gpu=None)]}, True),
    (79, {"events": [event("", 1, "checked", 1, gpu=None)]}, False),
    (79, {"nodes": [state("", 1.9, 1, "draining"), state("", 1, None, "up")]}, True),
    (79, {"nodes": [state("", 1.9, None, "draining")]}, False),
    (79, {"gpus": [device("", 20, "GPU-a"), device("", 1, "GPU-b")]}, True),
    (79, {"gpus": [device("", 20, "GPU-a"), device("", 1, "GPU-a")]}, False),
    (54, {"events": [event("", 1, "boot", gpu=None)]}, False),
    (119, {"events": [event("", 1, code=154, text="from 0x1 (GPU Reset) to 0x0 (None)")]}, True),
]


def test_what_clears_a_drain(tmp_path: Path) -> None:
    tables: dict[str, list[dict[str, Any]]] = {"events": [], "nodes": [], "gpus": []}
    for at, (code, ends, _) in enumerate(CLEARS):
        tables["events"].append(event(f"n{at}", 2, code=code))
        for table, made in ends.items():
            tables[table] += [one | {"node": f"n{at}"} for one in made]
    health = judged(tmp_path, **tables)
    found = [only(health, f"n{at}") for at in range(len(CLEARS))]
    assert [one.action != "drain" for one in found] == [cleared for _, _, cleared in CLEARS]
    assert all(one.score is not None and one.score < 80 for one in found)


def test_what_is_only_watched_fades(tmp_path: Path) -> None:
    health = judged(tmp_path, events=[event("n1", 0, code=94), event("n2", 21, code=94)])
    assert (only(health, "n1").action, only(health, "n2").action) == ("watch", "ok")
    several = [event("n1", 0.2 * i, code=94) for i in range(3)]
    assert only(judged(tmp_path / "more", events=several)).action == "check"


def test_a_node_that_is_out_already_is_told_so(tmp_path: Path) -> None:
    node = only(judged(tmp_path, events=[event("n1", 2, code=48)],
                       nodes=[state("n1", 1, None, "down")]))  # fmt: skip
    assert node.is_out
    assert node.action == "drain"


def test_a_node_of_which_nothing_is_known_is_not_called_sound(tmp_path: Path) -> None:
    node = only(judged(tmp_path, nodes=[state("n1", 9, None, "up")]))
    assert (node.score, node.action) == (None, "unknown")


def test_lemons_fail_again_and_again(tmp_path: Path) -> None:
    nodes = [state(f"n{i}", 29, None, "up") for i in range(20)]
    faults = []
    for days in (25, 18, 11, 4):
        faults += [event("n1", days, code=79), event("n1", days - 0.5, "boot", gpu=None)]
    faults += [event("n7", 6, code=119), event("n7", 5, "boot", gpu=None)]
    health = judged(tmp_path, events=faults, nodes=nodes)
    assert [one.node for one in health.nodes if one.is_lemon] == ["n1"]
    assert only(health).action == "drain"
    assert "4 incidents" in only(health).reasons[0]
    assert not only(health, "n7").is_lemon
    tested = [*faults, event("n1", 1, "checked", 0, gpu=None)]
    assert not only(judged(tmp_path / "tested", events=tested, nodes=nodes)).is_lemon


def test_a_bad_night_is_one_incident(tmp_path: Path) -> None:
    nodes = [state(f"n{i}", 29, None, "up") for i in range(20)]
    events = [event("n1", 2 - i / 24, code=code) for i, code in enumerate((79, 48, 62, 119, 64))]
    assert not only(judged(tmp_path, events=events, nodes=nodes)).is_lemon


def test_one_counter_that_rises_faster_than_others(tmp_path: Path) -> None:
    events = [event(f"n{i}", i % 5, "ecc_corrected") for i in range(8)]
    events += [event("n1", i / 8, "ecc_corrected") for i in range(1, 40)]
    health = judged(tmp_path, events=events)
    assert [one.node for one in health.nodes if one.anomalies] == ["n1"]
    assert "ecc_corrected errors in" in only(health).reasons[0]


def test_heat_and_slow_clocks_show_against_peers(tmp_path: Path) -> None:
    times = NOW - np.arange(1, 121) * 60.0
    parts = []
    for at in range(16):
        clock = 1600.0 if at == 5 else 1900.0 + at
        names = {"cluster": ["east"] * 120, "node": [f"n{at}"] * 120, "gpu": [0] * 120}
        # n9 was last measured two hours before the others.
        columns = {"time_s": times - (7500.0 if at == 9 else 0.0), "sm_clock_mhz": [clock] * 120,
                   "gpu_util": [0.9] * 120, "tensor_active": [0.35] * 120,
                   "throttle": [float(0x40 if at == 3 else 0x4)] * 120}  # fmt: skip
        parts.append(make_rows("gpu_samples", names | columns))
    health = judged(tmp_path, gpu_samples=pa.concat_tables(parts))
    odd = {one.node: one.anomalies[0].kind for one in health.nodes if one.anomalies}
    assert odd == {"n3": "heat", "n5": "slow", "n9": "silent"}
    assert only(health, "n3").action == "check"
    assert only(health, "n9").action_text == "see whether the node is up, and its exporter runs"
    assert only(health, "n9").cleared_by == "samples that come again"


def test_the_driver_takes_back_what_it_asked_of_one_gpu(tmp_path: Path) -> None:
    def told(node: str, days: float, pci: str, code: int, text: str) -> dict[str, Any]:
        return event(node, days, code=code, text=f"0000:{pci}:00: {text}", gpu=None)

    done = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    events = [told(node, 2, "9b", 119, "Timeout") for node in ("n1", "n2")]
    events += [told("n1", 1, "9b", 154, done), told("n2", 1, "3a", 154, done)]
    health = judged(tmp_path, events=events)
    assert only(health, "n1").action != "drain"
    assert only(health, "n2").action == "drain"


def test_a_uuid_in_a_log_finds_its_index(tmp_path: Path) -> None:
    told = event("n1", 1, code=119, text="0000:9b:00 GPU-a: Timeout after 6s", gpu=None)
    gpus = [device("n1", 20, "GPU-a")]
    assert only(judged(tmp_path, events=[told], gpus=gpus)).reasons[0].startswith("GPU 0: Xid 119")
