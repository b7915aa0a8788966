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
from meshwright.run.nn.huggingface import load
from meshwright.run.posttrain.supervised import open_recipe, record
from meshwright.run.posttrain.supervised.distil import DistilLearner
from meshwright.run.posttrain.supervised.teacher import read_teacher
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.llm import LLM
from meshwright.spec.serving import Limits
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
    limits = Limits(batch_tokens=256, batch_requests=16, block_tokens=16, kv_blocks=64)
    llm = LLM(model_folder(), EngineSettings(limits=limits, device="cpu", precision="fp32"))
    prompts = [
        llm.words.encode(llm.words.chat(one["messages"][:1]), special=False) for one in chats(12)
    ]
    sampling = Sampling(temperature=1.0, max_tokens=6, seed=3)
    assert record(llm, prompts, tmp_path / "told.jsonl", words=8, sampling=sampling) == 12
    return [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]


def test_a_model_differs_from_its_own_record_by_rounding_alone(tmp_path: Path) -> None:
    job = recipe_job("distil", tmp_path, records=recorded(tmp_path))
    task, job = open_recipe(job)
    learner = task.learner(load(None, model_folder(), dtype=torch.float32), job, tmp_path)
    assert isinstance(learner, DistilLearner)
    batch = task.batches(job, rank=0, world=1).at(0)
    loss = learner.loss(batch)
    assert int(loss.count) == batch.targets > 0
    assert float(loss.nats_sum.detach()) / batch.targets < 1e-4
    assert float(learner.figures()["agreed"]) == 1.0


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_divergence_from_a_teacher_falls(direction: str, tmp_path: Path) -> None:
    told = recorded(tmp_path)
    # The student begins elsewhere: it has other weights, drawn from the seed.
    changes = {"recipe": {"direction": direction}, "start_from": None,
               "model": str(model_folder()), "chats": {"words": str(model_folder())},
               "optimizer": {"lr": 0.003}, "epochs": 20.0}  # fmt: skip
    job = recipe_job("distil", tmp_path, changes, records=told)
    trained(job, tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert rows[max(rows)] < 0.6 * rows[1]


def test_longer_lists_elsewhere_change_nothing_of_shorter_ones(tmp_path: Path) -> None:
    found = []
    for most in (1, 4):
        every = RECORDS["distil"]()
        for number, one in enumerate(every):
            count = most if number % 10 == 9 else 1  # held out, or trained
            one["words"], one["logprobs"] = (
                [row[:count] for row in one[name]] for name in ("words", "logprobs")
            )
        task, job = open_recipe(recipe_job("distil", tmp_path, records=every))
        learner = task.learner(load(None, model_folder(), dtype=torch.float32), job, tmp_path)
        assert isinstance(learner, DistilLearner)
        assert learner.words.shape[1] == most
        loss = learner.loss(task.batches(job, rank=0, world=1).at(0))
        found.append((float(loss.nats_sum.detach()), float(learner.figures()["agreed"])))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[1][1] == 1.0  # of one word each, both like the same best


def test_what_was_thought_stands_at_its_token(tmp_path: Path) -> None:
    path = tmp_path / "told.jsonl"
    path.write_text(json.dumps(TOLD) + "\n" + json.dumps({**TOLD, "prompt": [5, 9, 3]}) + "\n")
    found = read_teacher([path], length=16)
    assert found.prepared.tokens.tolist() == [5, 9, 17, 2, 5, 9, 3, 17, 2]
    assert found.words[[2, 3, 7, 8]].tolist() == [[17, 4], [2, 8]] * 2
    assert np.isneginf(found.logprobs[[0, 1, 4, 5, 6]]).all()
    cut = read_teacher([path], length=3)
    assert cut.prepared.tokens.tolist() == [5, 9, 17]  # nothing to train is left of the other
    assert cut.words.tolist() == [[0, 0], [0, 0], [17, 4]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": [17]}, "has 1 tokens, words for 2"),
        ({"words": [[17, 17], [2, 8]]}, "token 1 names a word twice"),
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
        read_teacher([path], length=16)


def test_chats_are_recorded_and_distilled_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "chats.jsonl", chats(6))
    told = tmp_path / "told.jsonl"
    words = ["generate", str(model_folder()), "--file", str(source), "--record", str(told)]
    engine = ["--device", "cpu", "--precision", "fp32", "--max-length", "64", "--max-tokens", "4"]
    assert main([*words, *engine]) == 0
    assert "answers" in capsys.readouterr().out
    found = read_teacher([told], length=64)
    assert found.prepared.units == 6
    assert found.words.shape[1] == 20
    assert main([*words[:2], "--record", str(told), *engine]) == 2
    assert "there is nothing to answer" in capsys.readouterr().err
