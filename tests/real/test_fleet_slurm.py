"""Real jobs through a real Slurm: what accounting, controller, prologs and slurmrestd come to."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshwright.fleet.sources.slurm.command_source import SlurmCommandSource
from meshwright.fleet.sources.slurm.slurm_source import open_source
from meshwright.fleet.sources.source import RowBatch, SourceOptions
from tests.real.slurm_cluster import GPUS_PER_NODE, NODES, SlurmCluster, lacking

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "never"),
    pytest.mark.xdist_group("slurm"),
]

HOOKS = Path(__file__).parents[2] / "src/meshwright/fleet/sources/slurm/hooks"
Rows = dict[str, list[dict[str, Any]]]


class Ran(NamedTuple):
    """A cluster on which jobs ran, and their numbers."""

    cluster: SlurmCluster
    jobs: Mapping[str, str]
    gpu_map: Path
    before: list[RowBatch]
    """What was read while some of them ran."""


def rows(batches: list[RowBatch]) -> Rows:
    found: Rows = {}
    for batch in batches:
        found.setdefault(batch.table, []).extend(batch.rows.to_pylist())
    return found


def commands(cluster: SlurmCluster, **more: Any) -> SlurmCommandSource:
    return SlurmCommandSource(SourceOptions(), {}, environment=cluster.environment, **more)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("slurm")
    gpu_map = folder / "gpu-map.log"
    hooks = [
        (HOOKS / name).read_text().replace("/var/log/slurm/gpu-map.log", str(gpu_map))
        for name in ("prolog.sh", "epilog.sh")
    ]
    with SlurmCluster(folder / "run", *hooks) as cluster:
        yield _run_jobs(cluster, gpu_map)


def _run_jobs(cluster: SlurmCluster, gpu_map: Path) -> Ran:
    many = "srun python3 -c 'x = bytearray(64 << 20); import time; time.sleep(3)'"
    jobs = {
        "wide": cluster.submit(
            many, "-N2", "--ntasks-per-node=1", "--gpus-per-node=4", "-J", "wide|r"
        ),
        "bad": cluster.submit("exit 3", "--gpus=8", "-J", "bad"),
        "killed": cluster.submit("kill -9 $$", "--gpus=1"),
        "array": cluster.submit("sleep 1", "--array=1-3", "--gpus=1"),
        "waits": cluster.submit("sleep 1", "--array=1-4%2", "--gpus=1", "--hold"),
        "dropped": cluster.submit("sleep 1", "--gpus=1", "--hold"),
        "again": cluster.submit("sleep 600", "--gpus=2", "--requeue", "--wckey=llama"),
        "stopped": cluster.submit("sleep 600", "--gpus=1"),
        "late": cluster.submit("sleep 600", "--gpus=1", "--time=1"),
    }
    cluster.wait("jobs that run", lambda: _state(cluster, jobs["stopped"]) == "RUNNING")
    cluster.wait("a job that runs", lambda: _state(cluster, jobs["again"]) == "RUNNING")
    before = list(commands(cluster).read_batches())
    time.sleep(1.1)  # a second attempt must have another second of submission
    cluster.call("scontrol", "requeue", jobs["again"])
    cluster.call("scancel", jobs["stopped"], jobs["dropped"])
    cluster.call("scontrol", "update", "nodename=n4", "state=drain", "reason=fan noise")
    # A requeued job would wait two minutes; released at once it starts again.
    cluster.wait("the requeue", lambda: _state(cluster, jobs["again"]) == "PENDING")
    cluster.call("scontrol", "update", f"jobid={jobs['again']}", "starttime=now")
    cluster.wait("its second start", lambda: _state(cluster, jobs["again"]) == "RUNNING", 150.0)
    cluster.wait("the time limit", lambda: _state(cluster, jobs["late"]) == "TIMEOUT", 150.0)
    cluster.wait("accounting", lambda: "TIMEOUT" in cluster.call("sacct", "-aXno", "State"))
    return Ran(cluster, jobs, gpu_map, before)


def _state(cluster: SlurmCluster, job: str) -> str:
    told = cluster.call("scontrol", "-o", "show", "job", job, check=False)
    return told.partition("JobState=")[2].split(" ")[0]


def _by_name(found: Rows) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["job"], row["attempt"]): row for row in found["jobs"]}


def test_every_job_ends_in_the_table_as_it_ended(ran: Ran) -> None:
    jobs = _by_name(rows(list(commands(ran.cluster).read_batches())))
    one = ran.jobs
    wide = jobs[one["wide"], 0]
    assert (wide["state"], wide["gpus"], wide["gpu_kind"]) == ("completed", 8.0, "a100")
    assert (wide["nodes"], wide["name"]) == (["n1", "n2"], "wide|r")
    assert 2 * (64 << 20) < wide["memory_peak"] < 4 * (64 << 20)
    bad, killed = jobs[one["bad"], 0], jobs[one["killed"], 0]
    assert (bad["state"], bad["exit_code"], bad["signal"]) == ("failed", 3, 0)
    assert (killed["state"], killed["exit_code"], killed["signal"]) == ("failed", 0, 9)
    stopped, late = jobs[one["stopped"], 0], jobs[one["late"], 0]
    assert (stopped["state"], stopped["reason"]) == ("cancelled", "cancelled by root")
    assert (late["state"], late["time_limit_s"]) == ("timeout", 60.0)
    assert late["end_s"] - late["start_s"] >= 60.0
    elements = {key: row for key, row in jobs.items() if row["array"] == one["array"]}
    assert {name for name, _ in elements} == {f"{one['array']}_{task}" for task in (1, 2, 3)}
    assert {row["state"] for row in elements.values()} == {"completed"}
    assert len({row["scheduler_id"] for row in elements.values()}) == 3
    first, second = jobs[one["again"], 0], jobs[one["again"], 1]
    assert (first["state"], second["state"]) == ("requeued", "running")
    assert first["end_s"] <= second["start_s"]
    assert second["workload"] == "llama"
    # Held jobs are not in accounting: only the controller knows them.
    waiting = [row for row in jobs.values() if row["array"] == one["waits"]]
    assert [row["state"] for row in waiting] == ["pending"] * 4


def test_what_was_read_before_is_brought_to_its_end(ran: Ran) -> None:
    cursor = ran.before[-1].cursor
    assert cursor is not None
    then = _by_name(rows(ran.before))
    assert then[ran.jobs["stopped"], 0]["state"] == "running"
    # No overlap: what still ran when it was last read is asked for by its number.
    later = rows(list(commands(ran.cluster, overlap_s=0.0).read_batches(cursor)))
    now = _by_name(later)
    assert now[ran.jobs["stopped"], 0]["state"] == "cancelled"
    assert then[ran.jobs["dropped"], 0]["state"] == "pending"
    dropped = now[ran.jobs["dropped"], 0]
    assert (dropped["state"], dropped["start_s"]) == ("cancelled", None)
    # Slurm 22.05 keeps no count of restarts; attempts are the same as in a reading of everything.
    assert now[ran.jobs["again"], 0]["state"] == "requeued"
    assert now[ran.jobs["again"], 1]["state"] == "running"
    held = [row for row in later["allocations"] if row["job"] == ran.jobs["stopped"]]
    assert [row["end_s"] for row in held] == [now[ran.jobs["stopped"], 0]["end_s"]]


def test_prologs_keep_the_map_of_gpus(ran: Ran) -> None:
    found = rows(list(commands(ran.cluster, gpu_map=str(ran.gpu_map)).read_batches()))
    jobs = _by_name(found)
    held: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in found["allocations"]:
        held.setdefault((row["job"], row["attempt"]), []).append(row)
    for key, parts in held.items():
        job = jobs[key]
        assert len(parts) == job["gpus"], key
        assert {part["node"] for part in parts} == set(job["nodes"]), key
        assert all(abs(part["start_s"] - job["start_s"]) <= 3 for part in parts)
        assert all((part["end_s"] is None) == (job["end_s"] is None) for part in parts), key
    assert {(ran.jobs["again"], 0), (ran.jobs["again"], 1)} <= set(held)
    # No GPU is two jobs' at once.
    by_gpu: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in found["allocations"]:
        span = (row["start_s"], row["end_s"] or float("inf"))
        by_gpu.setdefault((row["node"], row["gpu"]), []).append(span)
    for spans in by_gpu.values():
        ends = [end for _, end in sorted(spans)]
        assert all(start >= end for (start, _), end in zip(sorted(spans)[1:], ends, strict=False))


def test_a_node_that_was_drained_was_up_before(ran: Ran) -> None:
    found = rows(list(commands(ran.cluster).read_batches()))["nodes"]
    assert {row["node"] for row in found} == set(NODES)
    assert {(row["gpus"], row["gpu_kind"]) for row in found} == {(GPUS_PER_NODE, "a100")}
    fourth = sorted((row for row in found if row["node"] == "n4"), key=lambda row: row["since_s"])
    assert [row["state"] for row in fourth] == ["up", "draining"]
    assert fourth[0]["until_s"] == fourth[1]["since_s"]
    assert (fourth[1]["reason"], fourth[1]["until_s"]) == ("fan noise", None)


def test_the_rest_daemon_tells_the_same(ran: Ran) -> None:
    asked = rows(list(open_source(str(ran.cluster.rest_socket), SourceOptions()).read_batches()))
    told = rows(list(commands(ran.cluster).read_batches()))
    there, here = _by_name(asked), _by_name(told)
    names = (
        "state",
        "start_s",
        "end_s",
        "submit_s",
        "gpus",
        "gpu_kind",
        "nodes",
        "scheduler_id",
        "team",
    )
    for key, row in there.items():
        assert {name: row[name] for name in names} == {name: here[key][name] for name in names}
    assert set(there) == set(here)
    assert {row["node"] for row in asked["nodes"]} == set(NODES)


def test_files_of_what_was_printed_tell_the_same(ran: Ran, tmp_path: Path) -> None:
    zone = "America/New_York"
    printed = ran.cluster.call("sacct", "-aDPo", "ALL", "-S", "1970-01-01", extra={"TZ": zone})
    (tmp_path / "sacct.txt").write_text(printed)
    document = ran.cluster.call("sacct", "-aD", "--json", "-S", "1970-01-01")
    (tmp_path / "sacct.json").write_text(document)
    assert json.loads(document)["jobs"]
    live = _by_name(rows(list(commands(ran.cluster).read_batches())))
    names = ("state", "start_s", "end_s", "submit_s", "eligible_s", "gpus", "nodes", "cpus",
             "memory_peak", "memory_requested", "time_limit_s", "workload")  # fmt: skip
    for name in ("sacct.txt", "sacct.json"):
        asked = SourceOptions(kind_options={"zone": zone})
        read = _by_name(rows(list(open_source(str(tmp_path / name), asked).read_batches())))
        assert len(read) >= 10
        for key, row in read.items():
            assert {n: row[n] for n in names} == {n: live[key][n] for n in names}, (name, key)
