"""Pods and nodes through the official client, of an API server that kmock emulates."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.fleet.sources.kubernetes.kubernetes_source import open_source
from meshwright.fleet.sources.source import RowBatch, Secret, SourceOptions

kmock = pytest.importorskip("kmock", reason="needs kmock, an emulated Kubernetes API")
client = pytest.importorskip("kubernetes.client", reason="needs the official client")

pytestmark = [pytest.mark.real, pytest.mark.slow]

NODE = {
    "metadata": {
        "name": "k1",
        "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nodepool": "big"},
    },
    "status": {
        "capacity": {"nvidia.com/gpu": "8", "cpu": "96", "memory": "1Ti"},
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2025-06-15T00:00:00Z"}
        ],
    },
}


class Emulated:
    """An API server in a thread of its own."""

    def __init__(self) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._up, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def __enter__(self) -> "Emulated":
        self._thread.start()
        assert self._up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator) as server:
            for plural, kind in (("pods", "Pod"), ("nodes", "Node")):
                emulator.resources[f"v1/{plural}"] = {"kind": kind, "namespaced": kind == "Pod"}
            self.url = str(server.url).rstrip("/")
            self._up.set()
            await self._end.wait()


@pytest.fixture
def cluster() -> Iterator[tuple[str, Any]]:
    with Emulated() as server:
        settings = client.Configuration()
        settings.host = server.url
        with client.ApiClient(settings) as api:
            yield server.url, client.CoreV1Api(api)


def _pod(name: str, uid: str, gpus: int = 4) -> dict[str, Any]:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"cpu": "16"}}
    running = {"running": {"startedAt": "2025-06-15T10:02:00Z"}}
    state = {"name": "c", "image": "torch", "imageID": "i", "ready": True, "restartCount": 0}
    meta = {"name": name, "namespace": "ml", "uid": uid}
    return {
        "metadata": meta | {"creationTimestamp": "2025-06-15T10:00:00Z"},
        "spec": {
            "nodeName": "k1",
            "containers": [{"name": "c", "image": "torch", "resources": resources}],
        },
        "status": {
            "phase": "Running",
            "startTime": "2025-06-15T10:01:00Z",
            "containerStatuses": [state | {"state": running}],
        },
    }


def _read(
    url: str, cursor: str | None = None
) -> tuple[dict[str, list[dict[str, Any]]], str | None]:
    found: dict[str, list[dict[str, Any]]] = {"jobs": [], "nodes": [], "allocations": []}
    token = Secret("never-to-be-seen")
    for batch in open_source(url, SourceOptions(cluster="c", token=token)).read_batches(cursor):
        assert isinstance(batch, RowBatch)
        found[batch.table] += batch.rows.to_pylist()
        cursor = batch.cursor or cursor
    return found, cursor


def test_pods_and_nodes_are_read_with_the_official_client(cluster: tuple[str, Any]) -> None:
    url, core = cluster
    core.create_node(NODE)
    core.create_namespaced_pod("ml", _pod("train-0", "u1"))
    core.create_namespaced_pod("ml", _pod("web", "u2", gpus=0))
    found, cursor = _read(url)
    (job,) = found["jobs"]
    assert (job["job"], job["state"], job["gpus"], job["cpus"]) == ("ml/train-0", "running", 4, 16)
    assert (job["nodes"], job["gpu_kind"], job["partition"]) == (
        ["k1"],
        "NVIDIA-H100-80GB-HBM3",
        "big",
    )
    (node,) = found["nodes"]
    assert (node["node"], node["state"], node["gpus"]) == ("k1", "up", 8)
    assert cursor is not None
    assert "never-to-be-seen" not in cursor


def test_a_pod_that_was_deleted_ends_and_its_name_comes_back_as_another_attempt(
    cluster: tuple[str, Any],
) -> None:
    url, core = cluster
    core.create_node(NODE)
    core.create_namespaced_pod("ml", _pod("worker-0", "u1"))
    _, cursor = _read(url)
    core.delete_namespaced_pod("worker-0", "ml")
    gone, cursor = _read(url, cursor)
    assert [(row["attempt"], row["state"]) for row in gone["jobs"]] == [(0, "cancelled")]
    core.create_namespaced_pod("ml", _pod("worker-0", "u2"))
    back, _ = _read(url, cursor)
    assert [(row["attempt"], row["state"]) for row in back["jobs"]] == [(1, "running")]


def test_a_pod_that_has_all_gpus_of_its_node_holds_each_of_them(cluster: tuple[str, Any]) -> None:
    url, core = cluster
    core.create_node(NODE)
    core.create_namespaced_pod("ml", _pod("some", "u1", gpus=4))
    core.create_namespaced_pod("ml", _pod("all", "u2", gpus=8))
    held = _read(url)[0]["allocations"]
    assert [(row["job"], row["gpu"]) for row in held] == [("ml/all", gpu) for gpu in range(8)]


def test_a_cordon_ends_the_stretch_before_it(cluster: tuple[str, Any]) -> None:
    url, core = cluster
    core.create_node(NODE)
    first, cursor = _read(url)
    core.patch_node("k1", {"spec": {"unschedulable": True}})
    second, _ = _read(url, cursor)
    ended, begun = second["nodes"]
    assert (ended["state"], ended["since_s"]) == ("up", first["nodes"][0]["since_s"])
    assert (begun["state"], begun["since_s"]) == ("draining", ended["until_s"])
