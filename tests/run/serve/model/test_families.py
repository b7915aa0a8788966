"""Greedy answers of served models equal those of transformers, token for token."""

from pathlib import Path

import pytest
import torch

from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.model.served_model import ServedModel
from tests.run.nn.huggingface.drawn import DRAWS, draw
from tests.run.nn.huggingface.reference import logits_of, reference
from tests.run.serve.model.greedy import Batch, greedy, random_prompts
from tests.run.serve.model.small import DEVICE

NEW = 6
QUICK = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "bloom", "nemotron_h", "qwen3_next")
"""One of each way to attend: rotary, windows with caps, sinks, latents, slopes, recurrences."""


def check(family: str, seed: int, folder: Path) -> None:
    theirs = reference(family, draw(family, seed))
    theirs.save_pretrained(folder)
    decoder = load_served_model(folder, device=DEVICE, dtype=torch.float32)
    prompts = random_prompts(min(decoder.model.vocab, 300))
    longest = max(map(len, prompts)) + NEW
    forward = ServedModel(decoder, PagedKVCache(decoder, 32, 4), max_model_len=longest)

    def equals(answers: list[list[int]]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            # Every token of the answer is the likeliest after all before it; the rest of the
            # longest sequence is there for rotary rules that look at the length.
            whole = torch.tensor([*prompt, *answer])
            padded = torch.nn.functional.pad(whole, (0, longest - len(whole)))
            chosen = logits_of(theirs, padded[None])[0].argmax(-1)
            assert chosen[len(prompt) - 1 : len(whole) - 1].tolist() == answer

    equals(greedy(forward, prompts, NEW))
    equals(greedy(forward, prompts, NEW, chunk=3))
    if not forward.has_recurrent_state:
        prompts[1:] = [prompts[0][:8] + prompt for prompt in prompts[1:2]]
        batch = Batch(forward)
        first = batch.add(prompts[0])
        while len(first.answer) < 2:
            batch.step([first])
        second = batch.add(prompts[1], shares=2)
        while len(second.answer) < NEW:
            batch.step([row for row in batch.rows if len(row.answer) < NEW])
        equals([row.answer for row in batch.rows])


@pytest.mark.parametrize("family", QUICK)
def test_answers_equal_transformers(family: str, tmp_path: Path) -> None:
    check(family, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", DRAWS)
def test_answers_of_every_family_equal_transformers(family: str, seed: int, tmp_path: Path) -> None:
    check(family, seed, tmp_path)
