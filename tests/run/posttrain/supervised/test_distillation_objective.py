"""A student comes to think what a teacher thought; records that cannot be are refused by line."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import numpy as np
import torch

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.supervised import open_recipe, record_teacher_completions
from meshwright.run.posttrain.supervised.distillation_objective import DistillationObjective
from meshwright.run.posttrain.supervised.teacher_logprobs import read_teacher_dataset
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.posttrain.supervised.tiny import (
    RECORDS,
    chats,
    model_folder,
    recipe_job,
    trained,
    write,
)
from tests.run.train.tiny import rows_of

TOLD = {"prompt": [5, 9], "tokens": [17, 2], "words": [[17, 4], [2, 8]],
        "logprobs": [[-0.2, -2.0], [-0.1, -3.0]]}  # fmt: skip


def recorded(tmp_path: Path) -> list[dict[str, Any]]:
    """Let the model itself, its weights as they are drawn, teach what it thinks."""
    limits = SchedulerConfig(
        max_num_batched_tokens=256, max_num_seqs=16, block_size=16, num_gpu_blocks=64
    )
    llm = LLM(model_folder(), EngineConfig(scheduler_config=limits, device="cpu", dtype="fp32"))
    prompts = [
        llm.tokenizer.encode(llm.tokenizer.apply_chat_template(one["messages"][:1]), special=False)
        for one in chats(12)
    ]
    sampling = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
    assert (
        record_teacher_completions(
            llm, prompts, tmp_path / "told.jsonl", top_k=8, sampling=sampling
        )
        == 12
    )
    return [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]


def test_a_model_differs_from_its_own_record_by_rounding_alone(tmp_path: Path) -> None:
    job = recipe_job("distillation", tmp_path, records=recorded(tmp_path))
    task, job = open_recipe(job)
    learner = task.make_objective(
        load_hf_checkpoint(None, model_folder(), dtype=torch.float32), job, tmp_path
    )
    assert isinstance(learner, DistillationObjective)
    batch = task.train_dataset(job, rank=0, world=1).get_batch(0)
    loss = learner.loss(batch)
    assert int(loss.count) == batch.num_targets > 0
    assert float(loss.loss_sum.detach()) / batch.num_targets < 1e-4
    assert float(learner.pop_metrics()["agreed"]) == 1.0


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_divergence_from_a_teacher_falls(direction: str, tmp_path: Path) -> None:
    told = recorded(tmp_path)
    # The student begins elsewhere: it has other weights, drawn from the seed.
    changes = {"recipe": {"direction": direction}, "initial_load_path": None,
               "model": str(model_folder()), "chats": {"tokenizer": str(model_folder())},
               "optimizer": {"lr": 0.003}, "epochs": 20.0}  # fmt: skip
    job = recipe_job("distillation", tmp_path, changes, records=told)
    trained(job, tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert rows[max(rows)] < 0.6 * rows[1]


def test_longer_lists_elsewhere_change_nothing_of_shorter_ones(tmp_path: Path) -> None:
    found = []
    for most in (1, 4):
        every = RECORDS["distillation"]()
        for number, one in enumerate(every):
            count = most if number % 10 == 9 else 1  # held out, or trained
            one["words"], one["logprobs"] = (
                [row[:count] for row in one[name]] for name in ("words", "logprobs")
            )
        task, job = open_recipe(recipe_job("distillation", tmp_path, records=every))
        learner = task.make_objective(
            load_hf_checkpoint(None, model_folder(), dtype=torch.float32), job, tmp_path
        )
        assert isinstance(learner, DistillationObjective)
        assert learner.top_token_ids.shape[1] == most
        loss = learner.loss(task.train_dataset(job, rank=0, world=1).get_batch(0))
        found.append((float(loss.loss_sum.detach()), float(learner.pop_metrics()["agreed"])))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[1][1] == 1.0  # of one word each, both like the same best


def test_what_was_thought_stands_at_its_token(tmp_path: Path) -> None:
    path = tmp_path / "told.jsonl"
    path.write_text(json.dumps(TOLD) + "\n" + json.dumps({**TOLD, "prompt": [5, 9, 3]}) + "\n")
    found = read_teacher_dataset([path], length=16)
    assert found.dataset.tokens.tolist() == [5, 9, 17, 2, 5, 9, 3, 17, 2]
    assert found.top_token_ids[[2, 3, 7, 8]].tolist() == [[17, 4], [2, 8]] * 2
    assert np.isneginf(found.top_logprobs[[0, 1, 4, 5, 6]]).all()
    cut = read_teacher_dataset([path], length=3)
    assert cut.dataset.tokens.tolist() == [5, 9, 17]  # nothing to train is left of the other
    assert cut.top_token_ids.tolist() == [[0, 0], [0, 0], [17, 4]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": [17]}, "has 1 tokens, top tokens for 2"),
        ({"words": [[17, 17], [2, 8]]}, "token 1 lists a token twice"),
        ({"logprobs": [[-0.2, -0.3], [-0.1, -3.0]]}, "token 1 has log-probabilities of 1.56"),
        ({"words": [[17], [2, 8]]}, "token 1 has 1 words and 2"),
        ({"prompt": "text"}, "is no recorded answer"),
        ({"more": 1}, "is no recorded answer"),
    ],
)
def test_records_that_cannot_be_are_refused_by_line(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    path = tmp_path / "told.jsonl"
    path.write_text(json.dumps(TOLD) + "\n" + json.dumps({**TOLD, **change}) + "\n")
    with pytest.raises(InputError, match=f"told.jsonl:2.*{what}"):
        read_teacher_dataset([path], length=16)


def test_chats_are_recorded_and_distilled_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "chats.jsonl", chats(6))
    told = tmp_path / "told.jsonl"
    words = [
        "generate",
        str(model_folder()),
        "--input-file",
        str(source),
        "--output-file",
        str(told),
    ]
    engine = ["--device", "cpu", "--dtype", "fp32", "--max-model-len", "64", "--max-tokens", "4"]
    assert main([*words, *engine]) == 0
    assert "answers" in capsys.readouterr().out
    found = read_teacher_dataset([told], length=64)
    assert found.dataset.num_units == 6
    assert found.top_token_ids.shape[1] == 20
    assert main([*words[:2], "--output-file", str(told), *engine]) == 2
    assert "there is nothing to answer" in capsys.readouterr().err
