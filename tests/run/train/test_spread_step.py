"""A run of several ranks trains as one device does, and comes to the same figures."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.evaluate import held_out_loss
from meshwright.run.train.job_file import read_job
from meshwright.run.train.trainer import Trainer
from tests.run.train.tiny import job_data

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "two replicas": {"dp": 2, "microbatch": 1},
    "two replicas of packed sequences": {"dp": 2, "packing": "pack"},
    "shared tensors": {"tp": 2, "sequence_parallel": True},
    "two stages": {"pp": 2, "microbatch": 1},
    "shards of Muon's matrices": {"dp": 2, "zero": 2, "microbatch": 1, "optimizer": "muon"},
}


def figures(trainer: Trainer) -> list[float]:
    """Train some steps and evaluate."""
    found = []
    for step in range(STEPS):
        losses = trainer.step.gradients(trainer.batches.at(step))
        report = trainer.step.update(losses, step).update
        found += [float(losses.mean), float(report.norm), float(losses.tokens)]
    assert trainer.held_out is not None
    held = held_out_loss(trainer.step, trainer.held_out, sequences=5, device=torch.device("cpu"))
    return [*found, held]


def on_rank(data: dict[str, Any], folder: Path) -> list[float]:
    job = read_job(data)
    return figures(Trainer(job, folder, Mesh(job.layout)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_come_to_the_figures_of_one_device(name: str, tokens: Path, tmp_path: Path) -> None:
    layout = dict(LAYOUTS[name])
    changes: dict[str, Any] = {"workload": {"packing": layout.pop("packing", "concat")}}
    same = {"layout": {"optimizer": layout.get("optimizer", "adamw")}}
    alone = figures(Trainer(read_job(job_data(tokens, changes | same)), tmp_path / "alone"))
    several = job_data(tokens, changes | {"layout": layout})
    for found in launch(2, on_rank, several, tmp_path / "several"):
        assert found == pytest.approx(alone, rel=2e-5)


def go_on(data: dict[str, Any], folder: Path, steps: int) -> list[float]:
    """Go on with the run in a folder for some steps, and save."""
    job = read_job(data)
    trainer = Trainer(job, folder, Mesh(job.layout) if job.layout.gpus > 1 else None)
    trainer.resume()
    found = []
    for _ in range(steps):
        step = trainer.step_number
        losses = trainer.step.gradients(trainer.batches.at(step))
        trainer.step.update(losses, step)
        trainer.step_number += 1
        found.append(float(losses.mean))
    trainer.save()
    trainer.close()
    return found


def test_a_run_goes_on_under_other_layouts(tokens: Path, tmp_path: Path) -> None:
    alone = job_data(tokens)
    wanted = go_on(alone, tmp_path / "alone", 8)
    moving, found = tmp_path / "moving", []
    for layout in (
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2, "zero": 3, "microbatch": 1},
        {"pp": 2, "schedule": "zb-h1"},
    ):
        several = job_data(tokens, {"layout": layout})
        ranks = launch(2, go_on, several, moving, 2)
        assert ranks[0] == ranks[1]
        found += ranks[0]
    found += go_on(alone, moving, 2)
    assert found == pytest.approx(wanted, rel=2e-5)
