"""Each recipe really learns, on held-out records too, and goes on as if it had never stopped."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.supervised import open_recipe
from tests.run.posttrain.supervised.tiny import model_folder, recipe_job, sparse, trained
from tests.run.train.tiny import bytes_saved, rows_of


def ends(run: Path, figure: str) -> tuple[float, float]:
    """Return the first and the last of a run's figure."""
    rows = rows_of(run, figure)
    return rows[min(rows)], rows[max(rows)]


@pytest.mark.parametrize("kind", ["sft", "lora", "dora"])
def test_answers_are_learnt(kind: str, tmp_path: Path) -> None:
    outcome = trained(recipe_job(kind, tmp_path), tmp_path / "run")
    first, last = ends(tmp_path / "run", "loss")
    assert last < first / 2
    assert outcome.eval_loss is not None
    assert outcome.eval_loss < first / 2


def test_an_adapter_learns_beside_weights_in_bf16(tmp_path: Path) -> None:
    changes = {"layout": {"precision": "bf16"}, "eval": {"every_steps": 10}}
    trained(recipe_job("lora", tmp_path, changes), tmp_path / "run")
    first, last = ends(tmp_path / "run", "loss")
    assert last < first / 2
    held = rows_of(tmp_path / "run", "eval_loss")
    assert list(held) == [10, 20, 30, 36]
    assert held[36] < held[10]


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_chosen_answers_become_likelier_than_rejected_ones(
    kind: str, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"optimizer": {"lr": 0.003}, "epochs": 2.0}
    changes |= {"adapter": adapter} if adapter else {}
    trained(recipe_job(kind, tmp_path, changes), tmp_path / "run")
    run = tmp_path / "run"
    margins, losses = ends(run, "margin"), ends(run, "loss")
    assert margins[0] == pytest.approx(0, abs=1e-4)  # the model is its own reference at first
    first = math.log(2) if kind == "dpo" else 25.0
    assert losses[0] == pytest.approx(first, rel=1e-3)
    assert margins[1] > 0.3
    assert losses[1] < losses[0]
    assert ends(run, "eval_accuracy")[1] == 1.0


def test_wanted_answers_become_likelier_than_unwanted_ones(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(recipe_job("kto", tmp_path, {"optimizer": {"lr": 0.003}, "epochs": 4.0}), run)
    assert ends(run, "margin")[0] == pytest.approx(0, abs=1e-4)
    assert ends(run, "loss")[0] == pytest.approx(0.5, rel=1e-3)
    assert ends(run, "margin")[1] > 0.1
    assert ends(run, "eval_margin")[1] > 0.1


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["whole", "adapter"])
def test_a_reward_model_tells_held_out_answers_apart(
    adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes: dict[str, Any] = {"optimizer": {"lr": 0.003}, "epochs": 2.0}
    trained(
        recipe_job("reward", tmp_path, changes | ({"adapter": adapter} if adapter else {})), run
    )
    assert ends(run, "loss")[0] == pytest.approx(math.log(2))
    assert ends(run, "eval_accuracy")[1] == 1.0
    assert ends(run, "margin")[1] > 1


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sft", {}),
        ("lora", {"adapter": {"dropout": 0.2}}),
        ("dpo", {}),
        ("kto", {"adapter": {"rank": 2}}),
        ("reward", {}),
    ],
)
def test_a_run_that_stopped_goes_on_bit_for_bit(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    job = recipe_job(kind, tmp_path, {"epochs": 1.0, **changes})
    trained(job, tmp_path / "whole")
    trained(job, tmp_path / "parts", stop_at_step=2)
    (tmp_path / "parts" / "reference.safetensors").unlink(missing_ok=True)  # it is found anew
    outcome = trained(job, tmp_path / "parts")
    assert outcome.resumed_at_step == 2
    assert bytes_saved(tmp_path / "parts") == bytes_saved(tmp_path / "whole")
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_microbatches_do_not_change_a_step(kind: str, tmp_path: Path) -> None:
    """The denominator is that of the whole step."""
    losses = []
    for size in (1, 4):
        changes = {"layout": {"microbatch": size}, "workload": {"global_batch": 4}, "epochs": 1.0}
        run = tmp_path / f"of-{size}"
        trained(recipe_job(kind, tmp_path, changes), run, stop_at_step=3)
        losses.append(list(rows_of(run).values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_examples_that_go_on_in_another_sequence_are_learnt_too(tmp_path: Path) -> None:
    changes = {"workload": {"sequence_length": 16}, "chats": {"length_policy": "split"}}
    trained(recipe_job("sft", tmp_path, changes), tmp_path / "run")
    first, last = ends(tmp_path / "run", "loss")
    assert last < first / 2


def test_answers_to_other_prompts_count_for_no_expert(tmp_path: Path) -> None:
    changes = {"initial_load_path": str(model_folder(sparse))}
    task, job = open_recipe(recipe_job("kto", tmp_path, changes))
    decoder = load_hf_checkpoint(None, model_folder(sparse), dtype=torch.float32)
    learner, batch = (
        task.make_objective(decoder, job, tmp_path),
        task.train_dataset(job, rank=0, world=1).get_batch(0),
    )
    learner.train(True)
    learner.begin_step(batch)
    assert decoder.training
    assert [part.tokens_per_expert for part in decoder.iter_moe_layers()] == [None, None]
    learner.loss(batch)
    for part in decoder.iter_moe_layers():
        assert part.tokens_per_expert is not None
        assert int(part.tokens_per_expert.sum()) == batch.tokens_BT.numel() * part.spec.top_k
