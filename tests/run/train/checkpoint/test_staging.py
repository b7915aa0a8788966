"""Copies in host memory: bounded, used again, and in the order of the file."""

from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.train.checkpoint import CheckpointConfig, CheckpointManager, staging
from meshwright.run.train.checkpoint.staging import (
    StagedBuffer,
    StagingBuffers,
    stage_tensors,
    view_as_bytes,
)
from tests.run.train.checkpoint.faulty_disk import loaded_step, state


def _tensors() -> list[torch.Tensor]:
    return [torch.arange(n, dtype=torch.int16) for n in (5, 0, 33, 64, 1, 100)]


def _copied(pieces: StagingBuffers) -> tuple[bytes, int]:
    """Stage the tensors while another thread takes the pieces; return the data and its pieces."""
    tensors = _tensors()
    pieces.resize(sum(2 * tensor.numel() for tensor in tensors), pinned=False)
    sent: SimpleQueue[StagedBuffer | None] = SimpleQueue()
    seen: list[StagedBuffer] = []
    data = bytearray()

    def write() -> None:
        while (filled := sent.get()) is not None:
            assert filled.start == len(data)
            data.extend(filled.wait_for_bytes())
            seen.append(filled)
            pieces.release(filled.buffer)

    writer = Thread(target=write)
    writer.start()
    stage_tensors(iter(tensors), pieces, sent.put)
    sent.put(None)
    writer.join()
    return bytes(data), len(seen)


EXPECTED = b"".join(bytes(view_as_bytes(tensor).tolist()) for tensor in _tensors())


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 406, 1000])
def test_data_comes_out_in_order_whatever_the_pieces(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", piece_bytes)
    pieces = StagingBuffers()
    data, count = _copied(pieces)
    assert data == EXPECTED
    assert count == -(-len(EXPECTED) // min(piece_bytes, len(EXPECTED)))


def test_a_checkpoint_passes_through_less_memory_than_it_has() -> None:
    pieces = StagingBuffers(limit_bytes=100)
    data, count = _copied(pieces)
    assert data == EXPECTED
    assert pieces.total_bytes <= 100
    assert count > 4


def test_memory_is_used_again_by_the_next_save() -> None:
    pieces = StagingBuffers()
    _copied(pieces)
    first = pieces.acquire()
    pieces.release(first)
    _copied(pieces)
    assert pieces.acquire() is first


def test_memory_can_be_taken_before_the_first_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.allocate_staging(state(1))
        ready = checkpoints._pieces.total_bytes
        checkpoints.save(1, state(1), {"step": 1})
        assert checkpoints._pieces.total_bytes == ready > 0
    assert loaded_step(tmp_path) == 1


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InputError, match="staging_bytes"):
        CheckpointConfig(staging_bytes=1000)
