"""Versions that do not fit into memory are refused before a byte of them is written."""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="lays weights out")

import torch

from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.weights.shared_memory import NoRoom


@pytest.fixture
def offered() -> Iterator[Offered]:
    found = Offered([{"w": Placed.all_of(torch.arange(6.0).view(2, 3))}])
    found.agree(found.holds)
    yield found
    found.close()


def test_a_version_without_room_is_refused_and_leaves_nothing(
    offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda file, at, _: real(file, at, 1 << 60))
    with pytest.raises(NoRoom, match=r"version-1 has .* left, .* are needed: make it larger"):
        offered.post(1)
    assert not [path for path in offered.folder.rglob("*") if path.is_file()]
    monkeypatch.undo()
    offered.post(1)
    assert [path.name for path in offered.files()] == ["source-0.weights"]
