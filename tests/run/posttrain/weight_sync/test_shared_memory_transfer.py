"""Versions that do not fit into memory are refused before a byte of them is written."""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="lays weights out")

import torch

from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync.shared_memory_transfer import SharedMemoryFullError
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender


@pytest.fixture
def offered() -> Iterator[WeightSender]:
    found = WeightSender([{"w": ShardedTensor.unsharded(torch.arange(6.0).view(2, 3))}])
    found.plan_transfer(found.shards)
    yield found
    found.close()


def test_a_version_without_room_is_refused_and_leaves_nothing(
    offered: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda file, at, _: real(file, at, 1 << 60))
    with pytest.raises(
        SharedMemoryFullError, match=r"version-1 has .* left, .* are needed: make it larger"
    ):
        offered.publish(1)
    assert not [path for path in offered.folder.rglob("*") if path.is_file()]
    monkeypatch.undo()
    offered.publish(1)
    assert [path.name for path in offered.list_files()] == ["source-0.weights"]
