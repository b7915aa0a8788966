from typing import Any

import pytest

from meshwright.fleet.sources.kubernetes.kubernetes_source import matches
from meshwright.fleet.sources.kubernetes.pod_history import update_history
from meshwright.fleet.sources.kubernetes.pods import build_job_rows, find_workload_name
from meshwright.fleet.sources.kubernetes.quantities import parse_quantity, parse_time

T0 = 1_749_981_600.0
"""2025-06-15T10:00:00Z"""
H100 = {"k1": {"nvidia.com/gpu.product": "NVIDIA-H100", "nodepool": "big"}}


def _time(minute: int) -> str:
    return f"2025-06-15T{10 + minute // 60:02d}:{minute % 60:02d}:00Z"


def _container(gpus: object = 8, name: str = "c", **more: Any) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus), "cpu": "16", "memory": "64Gi"}
    return {"name": name, "image": "torch", "resources": {"limits": limits}, **more}


def _pod(
    phase: str = "Running", status: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    meta = {"name": "a-0", "namespace": "ml", "uid": "u1", "creationTimestamp": _time(0)}
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _time(5)}
    return {
        "metadata": meta | more.pop("metadata", {}),
        "spec": {"nodeName": "k1", "containers": [_container()], **more.pop("spec", {})},
        "status": {"phase": phase, "conditions": [placed], **(status or {})},
    }


def _read(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return list(build_job_rows([pod], H100, "c", T0 + 7200).to_pylist())


def _state(restarts: int = 0, now: Any = None, before: Any = None) -> dict[str, Any]:
    now = now or {"running": {"startedAt": _time(10)}}
    return {"containerStatuses": [{"name": "c", "restartCount": restarts, "state": now,
                                   "lastState": before or {}}]}  # fmt: skip


def _end(minute: int, code: int, reason: str, began: int = 10) -> dict[str, Any]:
    return {"terminated": {"startedAt": _time(began), "finishedAt": _time(minute), "exitCode": code,
                           "reason": reason}}  # fmt: skip


def _minutes(row: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(
        None if row[name] is None else (row[name] - T0) / 60 for name in ("start_s", "end_s")
    )  # type: ignore[return-value]


def test_a_pod_holds_its_gpus_from_the_moment_it_has_a_node() -> None:
    (row,) = _read(_pod(status=_state()))
    assert (row["job"], row["state"], row["team"], row["attempt"]) == ("ml/a-0", "running", "ml", 0)
    assert _minutes(row) == (5, None)
    assert (row["gpus"], row["gpu_kind"], row["partition"]) == (8, "NVIDIA-H100", "big")
    assert (row["cpus"], row["memory_requested"], row["nodes"]) == (16, 64 * 2.0**30, ["k1"])


def test_a_pod_without_gpus_is_no_job() -> None:
    assert _read(_pod(spec={"containers": [_container(0)]})) == []


def test_a_pod_that_waits_says_why() -> None:
    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
           "message": "0/9 nodes are available: 9 Insufficient nvidia.com/gpu."}  # fmt: skip
    (row,) = _read(_pod("Pending", {"conditions": [why]}, spec={"nodeName": None}))
    assert (row["state"], row["start_s"], row["nodes"]) == ("pending", None, None)
    assert "Insufficient" in row["reason"]


def test_a_restart_is_an_attempt_that_begins_where_the_one_before_ended() -> None:
    back_off = {"waiting": {"reason": "CrashLoopBackOff"}}
    first, second = _read(_pod(status=_state(1, back_off, _end(30, 137, "OOMKilled"))))
    assert (first["attempt"], first["state"], first["signal"]) == (0, "out_of_memory", 9)
    assert _minutes(first) == (5, 30)
    assert (second["attempt"], second["state"], second["reason"]) == (
        1,
        "running",
        "CrashLoopBackOff",
    )
    assert _minutes(second) == (30, None)


def test_attempts_that_kubernetes_has_forgotten_are_not_made_up() -> None:
    rows = _read(_pod(status=_state(7, None, _end(90, 1, "Error", began=80))))
    assert [row["attempt"] for row in rows] == [6, 7]
    assert _minutes(rows[0]) == (80, 90)


@pytest.mark.parametrize(
    ("phase", "status", "state"),
    [
        ("Succeeded", _state(now=_end(60, 0, "Completed")), "completed"),
        ("Failed", _state(now=_end(60, 1, "Error")), "failed"),
        ("Failed", _state(now=_end(60, 137, "OOMKilled")), "out_of_memory"),
        ("Failed", {"reason": "Evicted"}, "preempted"),
        ("Failed", {"reason": "DeadlineExceeded"} | _state(now=_end(60, 143, "Error")), "timeout"),
        ("Failed", {"reason": "NodeShutdown"} | _state(now=_end(60, 143, "Error")), "node_fail"),
        ("Unknown", {"reason": "NodeLost"}, "unknown"),
    ],
)
def test_how_a_pod_ended(phase: str, status: dict[str, Any], state: str) -> None:
    (row,) = _read(_pod(phase, status))
    assert row["state"] == state


def test_a_disruption_tells_preemption_from_failure() -> None:
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    status = _state(now=_end(60, 143, "Error")) | {"conditions": [taken]}
    (row,) = _read(_pod("Failed", status))
    assert row["state"] == "preempted"


def test_parts_of_gpus_and_what_is_asked_for_before_the_start() -> None:
    limits = {"nvidia.com/mig-3g.40gb": "2"}
    (parts,) = _read(_pod(spec={"containers": [{"name": "c", "resources": {"limits": limits}}]}))
    assert parts["gpus"] == pytest.approx(6 / 7)
    first = [_container(2, "prepares"), _container(1, "stays", restartPolicy="Always")]
    (both,) = _read(_pod(spec={"initContainers": first}))
    assert both["gpus"] == 9
    labels = {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/gpu.replicas": "4"}
    (shared,) = build_job_rows([_pod()], {"k1": labels}, "c", T0).to_pylist()
    assert shared["gpus"] == 2


def test_owners_name_the_workload() -> None:
    replica = [{"kind": "ReplicaSet", "name": "serve-5b4c", "controller": True}]
    assert find_workload_name("serve-5b4c-x", replica, {"pod-template-hash": "5b4c"}) == "serve"
    assert find_workload_name("t-0", [{"kind": "PyTorchJob", "name": "t"}], {}) == "t"
    assert find_workload_name("n-29178910-x", [{"kind": "Job", "name": "n-29178910"}], {}) == "n"
    assert find_workload_name("alone", [], {}) == "alone"


def test_notebooks_and_shells_are_interactive() -> None:
    assert _read(_pod(metadata={"labels": {"component": "singleuser-server"}}))[0]["interactive"]
    shell = _container(1, stdin=True, tty=True)
    assert _read(_pod(spec={"containers": [shell]}))[0]["interactive"]
    assert not _read(_pod())[0]["interactive"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("64Gi", 64 * 2.0**30), ("1e3", 1000.0), ("2k", 2000.0), (8, 8.0),
     ("12E", 12e18), ("x", None), (None, None)],
)  # fmt: skip
def test_quantities(text: object, value: float | None) -> None:
    assert parse_quantity(text) == value


def test_times_have_a_zone() -> None:
    assert parse_time("2025-06-15T10:00:00Z") == T0
    assert parse_time("2025-06-15T12:00:00+02:00") == T0
    assert parse_time(None) is None


def test_what_is_remembered_numbers_attempts_on() -> None:
    found = build_job_rows([_pod(status=_state())], H100, "c", T0)
    _, kept = update_history(found, {}, T0)
    again, _ = update_history(found, kept, T0 + 60)
    assert again["attempt"].to_pylist() == [0]
    other = build_job_rows([_pod(status=_state(), metadata={"uid": "u2"})], H100, "c", T0 + 60)
    rows, kept = update_history(other, kept, T0 + 60)
    states = {row["attempt"]: (row["state"], row["end_s"]) for row in rows.to_pylist()}
    assert states == {0: ("cancelled", T0), 1: ("running", None)}
    gone, kept = update_history(found.slice(0, 0), kept, T0 + 120)
    assert gone["attempt"].to_pylist() == [1]
    nothing, _ = update_history(found.slice(0, 0), kept, T0 + 180)
    assert nothing.num_rows == 0


def test_contexts_and_kubeconfigs_are_claimed(tmp_path: Any) -> None:
    config = tmp_path / "config"
    config.write_text("apiVersion: v1\nkind: Config\nclusters: []\n")
    assert matches("kubernetes:east")
    assert matches(str(config))
    assert not matches("http://prometheus:9090")
    assert not matches(str(tmp_path))
