"""A run put together: its state, its device, what it refuses."""

import errno
from pathlib import Path

import pytest
import torch

from meshwright.errors import InputError, MissingDependency
from meshwright.run.train.checkpoint import CheckpointManager, CheckpointSaveError
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem
from meshwright.run.train.trainer import Trainer, select_device
from tests.run.train.tiny import tiny_job


def test_the_state_is_weights_and_what_the_optimizer_keeps(tokens: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_job(tokens), tmp_path)
    tensors = trainer.tensors()
    weight = tensors["model.embedding.weight"]
    assert isinstance(weight, torch.Tensor)
    assert weight.data_ptr() == trainer.decoder.embedding.weight.data_ptr()
    assert "optimizer.first.embedding.weight" in tensors
    assert "optimizer.steps" in tensors
    trainer.close()


def test_the_same_seed_gives_the_same_first_weights(tokens: Path, tmp_path: Path) -> None:
    one, two, three = (
        Trainer(tiny_job(tokens, {"seed": seed}), tmp_path).decoder.embedding.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_a_missing_gpu_is_named(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependency, match="CUDA"):
        select_device(tiny_job(tokens, {"device": {"type": "cuda"}}))
    assert select_device(tiny_job(tokens, {"device": {"type": "auto"}})).type == "cpu"


def test_a_vocabulary_too_small_for_the_tokens_is_refused(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model knows 100"):
        Trainer(tiny_job(tokens, {"model": {"vocab": 100}}), tmp_path)


def test_evaluation_without_held_out_text_is_told(tokens: Path, tmp_path: Path) -> None:
    job = tiny_job(tokens, {"data": {"validation_fraction": 0.0}, "eval": {"every_steps": 2}})
    with pytest.warns(UserWarning, match="no validation data: evaluation is disabled"):
        assert Trainer(job, tmp_path).eval_dataset is None


class FullDisk(LocalFileSystem):
    """Has no room for the first few files."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def create(self, path: Path) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def _saving_to(disk: LocalFileSystem, tokens: Path, folder: Path) -> Trainer:
    trainer = Trainer(tiny_job(tokens), folder)
    trainer.checkpoints.close()
    trainer.checkpoints = CheckpointManager(
        folder / "checkpoints", trainer.job.checkpoint, disk=disk
    )
    return trainer


def test_a_save_that_failed_is_warned_of_and_the_next_one_made(
    tokens: Path, tmp_path: Path
) -> None:
    trainer = _saving_to(FullDisk(1), tokens, tmp_path)
    trainer.save()
    with pytest.warns(UserWarning, match="No space left"):
        trainer.save()
    assert trainer.find_latest_checkpoint() is not None
    trainer.close()


def test_a_disk_that_stays_full_ends_the_run(tokens: Path, tmp_path: Path) -> None:
    trainer = _saving_to(FullDisk(9), tokens, tmp_path)
    trainer.save()
    with pytest.warns(UserWarning, match="training goes on"):
        trainer.save()
    with pytest.warns(UserWarning, match="training goes on"):
        trainer.save()
    with pytest.raises(CheckpointSaveError, match="look at the space") as failed:
        trainer.save()
    assert failed.value.exit_code == 3
