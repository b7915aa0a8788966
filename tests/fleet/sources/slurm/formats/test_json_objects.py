"""Values, jobs and nodes of Slurm's JSON and of scontrol's text."""

from typing import Any

import pytest

from meshwright.fleet.sources.slurm.formats import json_objects
from meshwright.fleet.sources.slurm.formats.scontrol import iter_blocks
from meshwright.fleet.sources.slurm.job_records import make_records_from_rows
from meshwright.fleet.sources.slurm.snapshot import SlurmSnapshot
from meshwright.fleet.sources.slurm.tables.allocations import parse_gres_detail, read_prolog_log
from meshwright.fleet.sources.slurm.tables.jobs import build_job_rows
from meshwright.fleet.sources.slurm.tables.nodes import (
    SlurmNode,
    merge_node_history,
    nodes_from_scontrol,
)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7.0),
        ({"set": True, "infinite": False, "number": 7}, 7.0),
        ({"set": False, "infinite": False, "number": 0}, None),
        ({"set": True, "infinite": True, "number": 0}, None),
        (0xFFFFFFFE, None),  # NO_VAL
        (0xFFFFFFFF, None),  # INFINITE
        (2**64 - 2, None),
        (-2, None),
        (None, None),
        ("7", None),
        (True, None),
    ],
)
def test_numbers_of_both_generations(value: Any, number: float | None) -> None:
    assert json_objects.parse_number(value) == number


def accounted(**more: Any) -> dict[str, Any]:
    job: dict[str, Any] = {
        "job_id": 7, "array": {"job_id": 0}, "het": {"job_id": 0}, "cluster": "c", "nodes": "n1",
        "state": {"current": "COMPLETED", "reason": "None"},
        "time": {"submission": 10, "eligible": 10, "start": 20, "end": 30, "limit": 5},
        "exit_code": {"status": "SUCCESS", "return_code": 0}, "tres": {}, **more,
    }  # fmt: skip
    row: dict[str, Any] = build_job_rows(
        make_records_from_rows(json_objects.parse_accounting_jobs([job])), 99.0
    ).rows.to_pylist()[0]
    return row


def test_a_code_that_22_05_leaves_out_is_not_nought() -> None:
    failed = accounted(state={"current": "FAILED"})
    assert (failed["state"], failed["exit_code"]) == ("failed", None)
    killed = accounted(
        state={"current": "FAILED"},
        exit_code={"status": "SIGNALED", "return_code": None, "signal": {"signal_id": 9}},
    )
    assert (killed["exit_code"], killed["signal"]) == (0, 9)
    told = accounted(
        state={"current": ["FAILED"]},
        exit_code={
            "status": ["ERROR"],
            "return_code": {"set": True, "infinite": False, "number": 3},
            "signal": {"id": {"set": False, "infinite": False, "number": 0}, "name": ""},
        },
    )
    assert (told["exit_code"], told["signal"]) == (3, 0)


def test_limits_without_end_are_null() -> None:
    time = {
        "submission": 10,
        "start": 20,
        "end": 0,
        "limit": {"set": False, "infinite": True, "number": 0},
    }
    row = accounted(state={"current": ["RUNNING"]}, time=time)
    assert (row["time_limit_s"], row["end_s"], row["state"]) == (None, None, "running")


def test_arrays_and_groups_by_their_places() -> None:
    assert accounted(array={"job_id": 71, "task_id": 3})["job"] == "71_3"
    one = {"set": True, "infinite": False, "number": 0}
    assert accounted(array={"job_id": 71, "task_id": one})["job"] == "71_0"
    assert accounted(het={"job_id": 70, "job_offset": one})["job"] == "70+0"
    assert accounted(array={"job_id": 71, "task_id": None, "task": "2-4"})["job"] == "71_2"


def test_typed_and_untyped_gpus_of_json_are_the_same_gpus() -> None:
    entries = [
        {"type": "gres", "name": "gpu", "id": 1001, "count": 4},
        {"type": "gres", "name": "gpu:a100", "id": 1002, "count": 4},
        {"type": "energy", "name": None, "id": 3, "count": -2},
        {"type": "mem", "name": "", "id": 2, "count": 2000},
    ]
    row = accounted(tres={"allocated": entries, "requested": entries})
    assert (row["gpus"], row["gpu_kind"], row["memory_requested"]) == (4.0, "a100", 2000 * 2**20)


JOB = """JobId=8 ArrayJobId=5 ArrayTaskId=2 JobName=a = b|c
   UserId=eve(1001) GroupId=x(2) MCS_label=N/A
   Priority=1 Nice=0 Account=ml QOS=normal WCKey=*llama
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:10 TimeLimit=UNLIMITED TimeMin=N/A
   SubmitTime=2026-01-01T00:00:00 EligibleTime=2026-01-01T00:00:00
   StartTime=2026-01-01T00:01:00 EndTime=2026-01-02T00:01:00 Deadline=N/A
   NodeList=n[1-3]
   NumNodes=3 NumCPUs=6 NumTasks=3 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   TRES=cpu=6,mem=3G,node=3,billing=6,gres/gpu=6
   JOB_GRES=gpu:a100:6
     Nodes=n[1-2] CPU_IDs=0-1 Mem=1000 GRES=gpu:a100:2(IDX:0,3)
     Nodes=n3 CPU_IDs=0-1 Mem=1000 GRES=gpu:a100:2(IDX:6-7)
   Command=/x/y z=1

"""


def test_a_job_of_scontrol_with_its_gpus() -> None:
    reading = SlurmSnapshot(cluster="c")
    reading.add_blocks(list(iter_blocks(JOB)))
    found = reading.build_rows(99.0)
    (job,) = found["jobs"].to_pylist()
    assert (job["job"], job["scheduler_id"], job["attempt"], job["name"]) == (
        "5_2",
        "8",
        2,
        "a = b|c",
    )
    assert (job["user"], job["workload"], job["gpu_kind"], job["time_limit_s"]) == (
        "eve",
        "llama",
        "a100",
        None,
    )
    assert job["end_s"] is None  # what stands there is its limit
    held = {(row["node"], row["gpu"]) for row in found["allocations"].to_pylist()}
    assert held == {("n1", 0), ("n1", 3), ("n2", 0), ("n2", 3), ("n3", 6), ("n3", 7)}
    assert {row["attempt"] for row in found["allocations"].to_pylist()} == {2}


def test_parts_of_gpus_are_shares() -> None:
    assert parse_gres_detail("gpu:a100:2(IDX:0-1)") == {0: 1.0, 1: 1.0}
    assert parse_gres_detail("shard:a100:2(0/4,2/4)") == {1: 0.5}
    assert parse_gres_detail("gpu:a100:0(IDX:N/A)") == {}


def test_a_log_of_prologs_survives_requeues_and_lost_epilogs() -> None:
    log = """100 prolog job=7 node=n1 gpus=0,1 restarts=0
110 epilog job=7 node=n1 gpus=0,1
garbage
120 prolog job=7 node=n2 gpus=3 restarts=1
130 prolog job=7 node=n2 gpus=4 restarts=2
90 prolog job=6 user=root node=n9 gpus=5 cvd=5
"""
    holds = {
        (hold.job, hold.attempt): hold for hold in read_prolog_log(iter(log.splitlines()), "c")
    }
    assert (holds["7", 0].end_s, set(holds["7", 0].gpu_fractions)) == (110.0, {0, 1})
    assert (holds["7", 1].end_s, holds["7", 1].node) == (130.0, "n2")  # its epilog never ran
    assert (holds["7", 2].end_s, holds["6", 0].end_s) == (None, None)


def test_a_node_that_drains_tells_why_and_since_when() -> None:
    text = """NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=32 CPUTot=32 CPULoad=0.1
   Gres=gpu:a100:8(S:0-1)
   RealMemory=1000 AllocMem=0 State=IDLE+DRAIN ThreadsPerCore=1
   Partitions=gpu,all
   BootTime=2026-01-01T00:00:00
   Reason=bad gpu [3] x=1 [root@2026-01-02T00:00:00]
"""
    (node,) = nodes_from_scontrol(list(iter_blocks(text)), "c", "UTC")
    assert (node.state, node.reason, node.since_s) == ("draining", "bad gpu [3] x=1", 1767312000.0)
    assert (node.gpus, node.gpu_kind, node.partitions) == (8.0, "a100", ("gpu", "all"))


def test_between_its_events_a_node_was_up() -> None:
    now = SlurmNode("c", "n1", "up", 100.0, gpus=8.0, boot_s=100.0)
    events = [
        SlurmNode("c", "n1", "draining", 200.0, 300.0, "bad"),
        SlurmNode(
            "c", "n1", "down", 400.0, None, "gone"
        ),  # accounting has not heard that it is back
        SlurmNode("c", "n2", "down", 50.0, 60.0),
    ]
    rows = merge_node_history([now], events, 900.0)
    assert [(row.node, row.state, row.since_s, row.until_s) for row in rows] == [
        ("n1", "up", 100.0, 200.0),
        ("n1", "draining", 200.0, 300.0),
        ("n1", "up", 300.0, 400.0),
        ("n1", "down", 400.0, 900.0),
        ("n1", "up", 900.0, None),
        ("n2", "down", 50.0, 60.0),
    ]
    assert {row.gpus for row in rows[:5]} == {8.0}
