from typing import Any

from meshwright.fleet.sources.kubernetes.nodes import build_node_rows, parse_node_status
from meshwright.fleet.sources.kubernetes.resources import compute_gpu_fraction, decode_resource_name

T0 = 1_749_981_600.0


def _node(
    ready: str = "True", cordoned: bool = False, *conditions: dict[str, str]
) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if cordoned:
        taint = {"key": "node.kubernetes.io/unschedulable", "timeAdded": "2025-06-15T11:00:00Z"}
        spec = {"unschedulable": True, "taints": [taint]}
    own = {"type": "Ready", "status": ready, "lastTransitionTime": "2025-06-15T10:00:00Z"}
    return {
        "metadata": {"name": "k1", "labels": {"nvidia.com/gpu.product": "H100", "nodepool": "big"}},
        "spec": spec,
        "status": {
            "capacity": {"nvidia.com/gpu": "8", "cpu": "96", "memory": "2Ti"},
            "allocatable": {"nvidia.com/gpu": "7"},
            "conditions": [own, *conditions],
        },
    }


def test_states_of_a_node() -> None:
    assert parse_node_status(_node()) == ("up", T0, None)
    assert parse_node_status(_node(cordoned=True)) == ("draining", T0 + 3600, "cordoned")
    assert parse_node_status(_node("False")).state == "down"
    assert parse_node_status(_node("Unknown")).state == "down"
    assert parse_node_status({"metadata": {"name": "k1"}}).state == "unknown"


def test_what_a_problem_detector_says_is_kept() -> None:
    fault = {"type": "GpuXid", "status": "True", "reason": "Xid79"}
    pressure = {"type": "DiskPressure", "status": "False"}
    assert parse_node_status(_node("True", False, fault, pressure)).reason == "GpuXid: Xid79"


def test_a_gpu_that_failed_its_check_still_counts() -> None:
    table, _ = build_node_rows([_node()], {}, "c", T0 + 60)
    (row,) = table.to_pylist()
    assert (row["gpus"], row["cpus"], row["memory"]) == (8, 96, 2 * 2.0**40)
    assert (row["gpu_kind"], row["partitions"]) == ("H100", ["big"])


def test_a_state_that_changed_ends_the_one_before() -> None:
    _, before = build_node_rows([_node()], {}, "c", T0 + 60)
    table, now = build_node_rows([_node(cordoned=True)], before, "c", T0 + 3660)
    ended, begun = table.to_pylist()
    assert (ended["state"], ended["since_s"], ended["until_s"]) == ("up", T0, T0 + 3600)
    assert (begun["state"], begun["since_s"], begun["until_s"]) == ("draining", T0 + 3600, None)
    same, _ = build_node_rows([_node(cordoned=True)], now, "c", T0 + 7200)
    assert [(row["state"], row["since_s"]) for row in same.to_pylist()] == [("draining", T0 + 3600)]


def test_a_node_that_left_the_cluster_ends() -> None:
    _, before = build_node_rows([_node()], {}, "c", T0 + 60)
    table, now = build_node_rows([], before, "c", T0 + 120)
    assert [(row["state"], row["until_s"]) for row in table.to_pylist()] == [("up", T0 + 120)]
    assert now == {}


def test_resources_that_are_gpus() -> None:
    assert compute_gpu_fraction("nvidia.com/gpu") == compute_gpu_fraction("amd.com/gpu") == 1
    assert compute_gpu_fraction("cpu") == compute_gpu_fraction("nvidia.com/gpu.memory") == 0
    assert decode_resource_name("nvidia_com_gpu") == "nvidia.com/gpu"
    assert compute_gpu_fraction(decode_resource_name("nvidia_com_mig_3g_40gb")) == 3 / 7
    a30 = {"nvidia.com/gpu.product": "NVIDIA A30"}
    assert compute_gpu_fraction("nvidia.com/mig-2g.12gb", a30) == 0.5
