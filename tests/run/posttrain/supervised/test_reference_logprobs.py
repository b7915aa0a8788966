"""What answers were worth before anything was learnt is found once, by all replicas together."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="asks a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch
from torch import Tensor

from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.supervised import open_recipe
from meshwright.run.posttrain.supervised.reference_logprobs import (
    ReplicaGroupInfo,
    compute_reference_logprobs,
)
from tests.run.posttrain.supervised.tiny import LENGTH, model_folder, pairs, recipe_job


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found(folder: Path, replicas: ReplicaGroupInfo | None = None) -> Tensor:
    folder.mkdir(exist_ok=True)
    task = open_recipe(recipe_job("dpo", folder, records=pairs(20))).task
    decoder = load_hf_checkpoint(None, model_folder(), dtype=torch.float32)
    return compute_reference_logprobs(
        decoder,
        task.example_index,
        folder,
        "first",
        adapter=None,
        most_tokens=LENGTH,
        replicas=replicas,
    )


def test_each_of_several_replicas_finds_some_of_all_answers(tmp_path: Path) -> None:
    alone = found(tmp_path / "alone")
    # Nobody else is there, so sums are of one's own.
    parts = [
        found(tmp_path / f"{one}", ReplicaGroupInfo(one, 3, lambda mine: mine)) for one in range(3)
    ]
    assert all(0 < int((part != 0).sum()) < len(alone) / 2 for part in parts)
    torch.testing.assert_close(sum(parts), alone, rtol=0, atol=0)


def test_a_file_that_only_some_replicas_see_serves_all(tmp_path: Path) -> None:
    kept = found(tmp_path / "kept")
    asked = list[int]()

    def together(mine: Tensor) -> Tensor:
        asked.append(mine.numel())
        return mine + (1 if mine.numel() == 1 else kept)  # the other one has the file

    other = found(tmp_path / "lost", ReplicaGroupInfo(1, 2, together))
    torch.testing.assert_close(other, kept, rtol=0, atol=0)
    assert asked == [1, len(kept)]
