"""Steps replayed from fixed tensors, padded to a size, equal those computed as they come."""

from collections.abc import Callable

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.serve.engine.model_runner.decode_graphs import DecodeGraphs
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.served_model import ServedModel
from tests.run.serve.model.greedy import random_prompts
from tests.run.serve.model.small import DEVICE, capped, hybrid, small


@pytest.mark.parametrize("make", [small, hybrid, capped])
def test_padding_changes_no_logit_and_nothing_in_the_cache(make: Callable[[], Decoder]) -> None:
    decoder = make()
    forward = ServedModel(decoder, PagedKVCache(decoder, 16, 4), max_model_len=32, state_rows=4)
    graphs = DecodeGraphs(forward, 8)
    graphs.capture()
    prompts = random_prompts(decoder.model.vocab, (6, 3, 9))
    blocks = [[1, 2], [3], [4, 5, 6]]
    rows = [
        BatchRow(prompt, 0, table, state)
        for state, (prompt, table) in enumerate(zip(prompts, blocks, strict=True))
    ]
    forward.forward(build_forward_batch(rows, 4, DEVICE))
    kept, states = (
        forward.kv_cache.gather(range(16)),
        [each.state.clone() for each in forward.recurrent_states],
    )
    inputs = [each.conv_state.clone() for each in forward.recurrent_states]
    nexts = [
        BatchRow([7], len(row.tokens), [*row.blocks, 9 + row.state_row], row.state_row)
        for row in rows
    ]
    step = build_forward_batch(nexts, 4, DEVICE)
    wanted = forward.forward(step)
    after = forward.kv_cache.gather(range(16))
    forward.kv_cache.scatter(range(16), kept)
    for each, state, input_ in zip(forward.recurrent_states, states, inputs, strict=True):
        each.state.copy_(state)
        each.conv_state.copy_(input_)
    assert graphs.can_replay(step)
    if DEVICE == "cpu":
        # As capturing would make it.
        graphs.logits_buffer = torch.empty(8, decoder.model.vocab)
    found = graphs.run(step)
    assert graphs.logits_buffer is not None
    assert found.data_ptr() == graphs.logits_buffer.data_ptr()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        forward.kv_cache.gather(range(16)).view(torch.float32), after.view(torch.float32)
    )


def test_prompts_are_computed_as_they_come() -> None:
    decoder = small()
    forward = ServedModel(decoder, PagedKVCache(decoder, 16, 4), max_model_len=32)
    step = build_forward_batch([BatchRow([1, 2, 3], 0, [0])], 4, DEVICE)
    graphs = DecodeGraphs(forward, 2)
    assert not graphs.can_replay(step)
    assert torch.equal(graphs.run(step), forward.forward(step))


def test_sizes_have_to_reach_all_rows() -> None:
    decoder = small()
    forward = ServedModel(decoder, PagedKVCache(decoder, 4, 4))
    with pytest.raises(InputError, match="end with 8"):
        DecodeGraphs(forward, 8, sizes=(1, 4))
