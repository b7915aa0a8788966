"""Answers are learnt over several ranks as on one device."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.supervised import open_recipe, read_recipe
from meshwright.run.train.evaluate import held_out_loss
from meshwright.run.train.trainer import Trainer
from tests.run.posttrain.supervised.tiny import RECORDS, chats, recipe_data, write

LAYOUTS: dict[str, dict[str, Any]] = {
    "two replicas": {"dp": 2, "zero": 2},
    "shared tensors": {"tp": 2, "sequence_parallel": True},
    "two stages": {"pp": 2},
}


def figures(data: dict[str, Any], folder: Path) -> list[float]:
    """Train some steps and evaluate."""
    task, job = open_recipe(read_recipe(data))
    mesh = Mesh(job.layout) if job.layout.gpus > 1 else None
    trainer, found = Trainer(job, folder, mesh, task=task), []
    for step in range(3):
        losses = trainer.step.gradients(trainer.batches.at(step))
        report = trainer.step.update(losses, step).update
        found += [float(losses.mean), float(report.norm), float(losses.tokens)]
        found += [float(one) for one in losses.figures.values()]
    assert trainer.held_out is not None
    held = held_out_loss(trainer.step, trainer.held_out, sequences=5, device=torch.device("cpu"))
    trainer.close()
    return [*found, held]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", ["lora", "dpo", "kto", "reward"])
def test_replicas_come_to_the_figures_of_one_device(
    kind: str, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = write(tmp_path / "records.jsonl", RECORDS.get(kind, chats)())
    same: dict[str, Any] = {"workload": {"global_batch": 4}, "optimizer": {"lr": 0.001}}
    same |= {} if adapter is None else {"adapter": adapter}
    alone = figures(recipe_data(kind, source, same), tmp_path / "alone")
    several = recipe_data(kind, source, same | {"layout": {"dp": 2}})
    one, other = launch(2, figures, several, tmp_path / "several")
    assert one == other
    assert one == pytest.approx(alone, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_come_to_the_figures_of_one_device(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "records.jsonl", chats())
    same: dict[str, Any] = {"workload": {"global_batch": 4}}
    alone = figures(recipe_data("sft", source, same), tmp_path / "alone")
    several = recipe_data("sft", source, same | {"layout": LAYOUTS[name]})
    for found in launch(2, figures, several, tmp_path / "several"):
        assert found == pytest.approx(alone, rel=5e-5)
