"""Embeddings are the model's hidden states, pooled and of length one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.pooling import pool_embeddings
from meshwright.run.serve.model.served_model import ServedModel
from tests.run.serve.model.greedy import random_prompts
from tests.run.serve.model.small import DEVICE, hybrid, small


@pytest.mark.parametrize("make", [small, hybrid])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("batch_tokens", [100, 7])
def test_vectors_are_pooled(make: Callable[[], Decoder], pooling: Any, batch_tokens: int) -> None:
    decoder = make()
    prompts = random_prompts(61)
    wanted = []
    with torch.no_grad():
        for prompt in prompts:
            hidden = decoder.compute_hidden_states(torch.tensor([prompt], device=DEVICE))[0]
            pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
            wanted.append(pooled / pooled.norm())
    forward = ServedModel(decoder, PagedKVCache(decoder, 16, 4))
    tables = [range(5), range(5, 10), range(10, 15)]
    found = pool_embeddings(forward, prompts, tables, pooling=pooling, batch_tokens=batch_tokens)
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-4)


def test_unknown_pooling_is_refused() -> None:
    decoder = small()
    with pytest.raises(InputError, match="mean"):
        pool_embeddings(
            ServedModel(decoder, PagedKVCache(decoder, 4, 4)),
            [[1]],
            [[0]],
            pooling="max",  # type: ignore[arg-type]
        )
