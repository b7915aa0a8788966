"""Two generations of a real Slurm, and a large cluster's samples: every output tells the same."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.sources.source_registry import open_source

pytestmark = pytest.mark.real

RAN = ("job", "attempt", "scheduler_id", "state", "start_s", "end_s", "submit_s", "gpus", "nodes")
SHARED = (*RAN, "cluster", "name", "user", "team", "partition", "qos", "array", "time_limit_s",
          "cpus",
          "num_nodes", "memory_requested", "eligible_s", "memory_peak", "reason")  # fmt: skip
TIMELESS = ("job", "attempt", "name", "user", "team", "partition", "qos", "time_limit_s", "gpus",
            "num_nodes", "nodes", "cpus", "memory_requested", "state", "exit_code",
            "signal")  # fmt: skip


@pytest.fixture(scope="module")
def traces(shared: Path) -> Path:
    return shared / "fleet_traces"


def tables(where: Path, **asked: Any) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for batch in open_source(str(where), SourceOptions(**asked)).read_batches():
        found.setdefault(batch.table, []).extend(batch.rows.to_pylist())
    return found


def only(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    kept = [{name: row[name] for name in names} for row in rows]
    return sorted(kept, key=lambda row: (row["job"], row["attempt"]))


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_text_and_json_of_the_accounting_are_one_table(traces: Path, version: str) -> None:
    folder = traces / "slurm_real" / version
    text = tables(folder / "sacct_P_all_fields.psv.gz")["jobs"]
    document = tables(folder / "sacct.json.gz")["jobs"]
    assert only(text, SHARED) == only(document, SHARED)
    seconds = {row["job"]: row["cpu_s"] for row in document}
    for row in text:  # text has thousandths
        assert row["cpu_s"] == pytest.approx(seconds[row["job"]], abs=2e-3)


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_the_controller_tells_the_same_as_the_accounting(traces: Path, version: str) -> None:
    folder = traces / "slurm_real" / version
    told = {row["job"]: row for row in tables(folder / "scontrol_d_show_job.txt.gz")["jobs"]}
    accounted = tables(folder / "sacct.json.gz")["jobs"]
    assert len(accounted) >= 7
    for row in accounted:
        for name in (*RAN, "time_limit_s", "memory_requested", "team", "user"):
            assert told[row["job"]][name] == row[name], name


def test_both_generations_come_to_the_same_table_of_jobs(traces: Path) -> None:
    old, new = (
        only(
            tables(traces / "slurm_real" / version / "sacct_P_all_fields.psv.gz")["jobs"], TIMELESS
        )
        for version in ("22.05.8", "24.11.5")
    )
    both = {row["name"]: row for row in old}
    ended = [row for row in new if row["state"] in {"completed", "failed"} and row["name"] != "arr"]
    assert [row["name"] for row in ended] == ["train", "bad"]
    assert ended == [both[row["name"]] for row in ended]
    assert (both["bad"]["exit_code"], both["bad"]["state"]) == (3, "failed")
    assert both["tmo"]["state"] in {"timeout", "cancelled"}


def test_a_folder_is_one_reading(traces: Path) -> None:
    found = tables(traces / "slurm_real" / "24.11.5")
    assert [row["job"] for row in found["jobs"]] == ["1", "2", "3", "4", "5_1", "5_2", "5_3"]
    (held,) = found["allocations"]
    assert (held["job"], held["node"], held["gpu"], held["end_s"]) == ("3", "n4", 0, None)
    assert {(row["node"], row["gpus"], row["gpu_kind"]) for row in found["nodes"]} == {
        (f"n{number}", 8, "a100") for number in range(1, 5)
    }
    waits = next(row for row in found["jobs"] if row["job"] == "4")
    assert (waits["state"], waits["start_s"], waits["gpus"]) == ("pending", None, 32.0)
    assert waits["reason"] == "Resources"  # which only the controller tells


def test_prologs_tell_which_gpus(traces: Path) -> None:
    found = tables(traces / "slurm_real" / "22.05.8")
    jobs = {(row["job"], row["attempt"]): row for row in found["jobs"]}
    for row in found["allocations"]:
        job = jobs[row["job"], row["attempt"]]
        assert row["node"] in job["nodes"]
        assert abs(row["start_s"] - job["start_s"]) <= 2.0
    elements = {row["job"] for row in found["allocations"] if "_" in row["job"]}
    assert elements == {"5_1", "5_2", "5_3"}
    ended = [row for row in found["allocations"] if jobs[row["job"], 0]["end_s"] is not None]
    assert len({(row["job"], row["node"], row["gpu"]) for row in ended}) == len(ended)


def test_nodes_are_the_same_from_every_command(traces: Path) -> None:
    folder = traces / "slurm_real"
    names = ("22.05.8/scontrol_d_show_node.txt", "22.05.8/scontrol_o_show_node.txt",
             "22.05.8/sinfo.json.gz", "22.05.8/sinfo_N.txt", "24.11.5/scontrol_node.json.gz",
             "24.11.5/scontrol_node_o.txt", "24.11.5/sinfo.json.gz")  # fmt: skip
    for name in names:
        rows = tables(folder / name)["nodes"]
        told = {
            (row["node"], row["state"], row["gpus"], row["gpu_kind"], *row["partitions"],
             row["cpus"], row["memory"])
            for row in rows
        }  # fmt: skip
        assert told == {
            (f"n{place}", "up", 8, "a100", "gpu", 32.0, 128000 * 2**20) for place in range(1, 5)
        }, name


def test_samples_of_a_large_cluster(traces: Path) -> None:
    folder = traces / "gcm_slurm_samples"
    rows = tables(folder / "sample-sacct-output-midnight-edge-case.txt.gz", cluster="fair")["jobs"]
    assert len(rows) == 306
    assert {row["cluster"] for row in rows} == {"fair"}
    assert {row["state"] for row in rows} <= {
        "cancelled", "completed", "failed", "requeued", "timeout", "out_of_memory",
    }  # fmt: skip
    (running,) = tables(folder / "sample-sacct-running-output-large.txt.gz")["jobs"]
    assert (running["job"], running["scheduler_id"]) == ("6539191_195", "6539485")
    assert (running["state"], running["gpus"], running["end_s"]) == ("running", 1.0, None)
    (step,) = tables(folder / "sample-sacct-output.txt.gz")["jobs"]
    assert step["cpu_s"] == pytest.approx(91.654)
    assert step["memory_peak"] == 77460 * 1024


def test_what_has_not_changed_is_not_read_again(traces: Path) -> None:
    source = open_source(str(traces / "slurm_real" / "24.11.5"), SourceOptions())
    (*_, last) = source.read_batches()
    assert last.cursor is not None
    assert list(source.read_batches(last.cursor)) == []


def test_the_user_names_a_cluster_whatever_it_calls_itself(traces: Path) -> None:
    found = tables(traces / "slurm_real" / "24.11.5", cluster="east")
    assert {row["cluster"] for rows in found.values() for row in rows} == {"east"}


def test_a_copy_is_seen_when_it_was_printed(traces: Path) -> None:
    folder = traces / "gcm_slurm_samples"
    (running,) = tables(folder / "sample-sacct-running-output-large.txt.gz")["jobs"]
    assert running["seen_s"] - running["start_s"] == 93050  # so long it had run by then
    jobs = tables(traces / "slurm_real" / "22.05.8")["jobs"]
    latest = max(row["end_s"] or row["start_s"] or 0.0 for row in jobs)
    assert 0.0 <= jobs[0]["seen_s"] - latest < 60.0


def test_sinfo_needs_no_header(traces: Path) -> None:
    rows = tables(traces / "gcm_slurm_samples/sinfo-output-for-structured.txt.gz")["nodes"]
    assert len(rows) == 10
    assert {(row["gpus"], row["gpu_kind"], row["cpus"]) for row in rows} == {(8, "ampere", 256.0)}
    assert {row["node"]: row["state"] for row in rows if row["state"] != "up"} == {
        "node2654": "draining"
    }
    assert {tuple(row["partitions"]) for row in rows} == {("learn",)}
